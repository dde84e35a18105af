"""Export of trained models for use outside ortlab: `ortlab.export` and `ortlab.script`."""
