"""Live views: widgets for runs, graphs, settings and searches."""
