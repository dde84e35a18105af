"""Magics and views for notebooks. The only package that imports IPython and ipywidgets."""
