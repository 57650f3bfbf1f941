"""The demonstration behind ``make demo``: ``__main__`` says what it does and in which order."""
