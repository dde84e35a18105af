"""What a notebook shows: magics and charts. The only room that imports IPython and ipywidgets."""
