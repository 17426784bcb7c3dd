"""The verbs and their one-line help; the command object of ``some-verb`` is ``joulery.ui.cli.some_verb.command``."""

VERBS: dict[str, str] = {
    "config": "Check a site file, print it with its defaults, or print the schema.",
}
