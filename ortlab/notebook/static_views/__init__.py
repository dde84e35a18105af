"""Views that need no browser: plain text and images."""
