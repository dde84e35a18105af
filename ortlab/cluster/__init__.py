"""Workers: processes that train together, as an ipyparallel cluster. The only importer of that."""
