"""Live views: widgets of runs, graphs, settings and searches."""
