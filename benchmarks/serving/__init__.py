"""The serving benchmark: ``__main__`` says what it measures and in which order."""
