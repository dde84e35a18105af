"""General-purpose modules that do not depend on training."""
