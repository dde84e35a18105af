"""Workers: processes that train together, as an ipyparallel cluster (imported only here)."""
