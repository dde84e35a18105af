"""The magics %ort and %%ort."""
