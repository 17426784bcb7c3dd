"""Where the joules of a model went, for people: text, pictures, a page, and files for other tools."""
