"""A trained model leaves for anywhere: `ortlab.export`."""
