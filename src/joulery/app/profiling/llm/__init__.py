"""``joulery profile --from RUNS``: runs of language models that people have measured, and predictions from them."""
