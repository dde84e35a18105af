"""What is measured while a run trains, and where the samples are kept."""
