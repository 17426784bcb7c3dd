"""``joulery profile --from RUNS``: measured runs of language models, and predictions from them."""
