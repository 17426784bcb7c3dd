"""The verbs and their one-line help; the command object of ``some-verb`` is ``joulery.ui.cli.some_verb.command``."""

VERBS: dict[str, str] = {
    "doctor": "Say what can be read and set here, what is missing, and the line that grants it.",
    "up": "Serve a site file on this machine under load, adapt to the grid, say what it came to.",
    "plan": "Say how many GPUs the services need, who shares which, at what cost, and how far from optimal.",
    "profile": "Measure what the variants of a service cost on the slices of this machine.",
    "measure": "Run a command and measure it: joules by device, grams of CO2-equivalent.",
    "ledger": "Keep what runs cost by owner, workload, device and hour, and carbon budgets.",
    "monitor": "Measure processes in any language that ask for it, over a Unix socket.",
    "account": "Account recorded events with recorded power: joules by tensor operation.",
    "serve": "Serve models behind the gateway: Open Inference Protocol, one queue a service.",
    "replay": "Decide a recorded run once more, from its log alone, and compare.",
    "compare": "Compare traced runs: how alike, what got better or worse, layer by layer.",
    "precision": "Judge traced runs: similarity, and what the sensor resolves.",
    "schedule": "Schedule training jobs by carbon and energy: beside Slurm, or on this machine.",
    "submit": "Queue a training job on this machine.",
    "jobs": "List the training jobs of a site, or cancel one.",
    "agent": "Meter the jobs of this node of a Slurm cluster, for the scheduler.",
    "report": "Report recorded runs: joules, grams, of whom, how well known.",
    "simulate": "Play a scenario in virtual time: policies side by side on the same requests.",
    "train-length-predictor": "Learn from a log how long answers will be, and say how well.",
    "config": "Check a site file, print it with its defaults, or print the schema.",
}
