"""Prompts for language models where the site file names none: they ask for a word, a sentence, a list or a page."""

PROMPTS = (
    "Which month comes after June? Answer with one word.",
    "Is 91 a prime number? Answer yes or no.",
    "Name the three states of matter that water has in a kitchen.",
    "In one sentence: why does bread rise in the oven?",
    "Write a polite sentence that puts a meeting off until Thursday.",
    "List five tools that a bicycle mechanic uses every day, one a line.",
    "Explain to a child of eight why the sky is dark at night.",
    "Summarise in two sentences what a heat pump does and what it needs for that.",
    "Write a short poem about a train that leaves a small station in the snow.",
    "Compare renting and owning a washing machine for somebody who moves every year. Give three points for each.",
    "Describe, step by step, how to change the tyre of a car on a slope, and what could go wrong at each step.",
    "Write a page of a story that begins with the words: the lighthouse had been sold, but nobody had told the keeper.",
)
