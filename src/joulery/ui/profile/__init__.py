"""``joulery profile --clocks``: how a model feels the clock, in text and as a page."""
