"""Further prompts for the default predictor: forms by kind of answer, and the values of their placeholders.

The forms were written for joulery; none is taken from a data set. A form keeps its number, so that whole forms can be
held out.
"""

from __future__ import annotations

import random

TOPICS = (
    *("solar panels", "sourdough", "the Roman Empire", "electric cars", "inflation", "yoga", "black holes", "podcasts"),
    *("sharks", "remote work", "vaccines", "haiku", "the French Revolution", "recycling", "marathon training", "opera"),
    *("photosynthesis", "blockchain", "gothic architecture", "hiking boots", "earthquakes", "mindfulness", "baseball"),
    *(
        "antibiotics",
        "chess openings",
        "coral reefs",
        "public libraries",
        "jet lag",
        "quantum computers",
        "the Silk Road",
    ),
    *("house plants", "tax returns", "origami", "wind turbines", "the stock market", "sleep", "tango"),
    "fermentation",
)
CITIES = ("Lisbon", "Nairobi", "Montreal", "Kyoto", "Lima", "Oslo", "Hanoi", "Cairo", "Dublin", "Seoul")
PEOPLE = ("Nadia", "Victor", "Priya", "Lars", "Chen", "Fatima", "George", "Ines")
JOBS = ("nurse", "carpenter", "data analyst", "teacher", "pilot", "baker", "lawyer", "electrician")
LANGUAGES = ("Spanish", "German", "Italian", "Portuguese", "Dutch", "Polish")
CODE = ("Python", "JavaScript", "Java", "C++", "Rust", "Go", "SQL", "Bash")
PASSAGES = (
    "The old harbour was closed in 1987 after the new one had opened further east. Since then the quays have been used "
    "for markets, concerts and, in hard winters, for sledging.",
    "Our team measured the water of twelve lakes over three summers. Nine of them were warmer than a decade before; in "
    "two the number of fish had halved.",
    "The parcel was sent on Monday, reached the depot on Wednesday and was then returned because the street name was "
    "misspelled. The customer asks for a refund of 42 euros.",
    "Bees visit up to a hundred flowers on one trip. They find their way by the sun, even when it is behind clouds, "
    "and tell the others in the hive where to go.",
)
FORMS = (
    # a word, a number, a label
    "Answer with one word: what is the capital of the country in which {city} lies?",
    "{n} + {m} * 2 = ?",
    "Is the following statement true or false? {T} can be bought in {city}.",
    "Classify this text as news, opinion or advertising. Only give the label.\n\n{passage}",
    "On a scale from 1 to 10, how difficult is {t} for beginners? Just the number.",
    "What is {n} percent of {big}? Give only the result.",
    "Which one does not belong: {t}, {u}, {v}? Answer with that one only.",
    "Which language is this: 'Ik hou van {t}'?",
    "Extract all numbers from the text, separated by commas.\n\n{passage}",
    'Give the sentiment (positive, neutral, negative) of: "{who} found the talk about {t} rather long."',
    "What year did the {n}th century begin?",
    'Return the JSON object {{"name": ..., "city": ...}} for: {who} has lived in {city} for {n} years.',
    "Pick the odd number out: {n}, {m}, {big}.",
    "Name the part of speech of the word '{adj}' in one word.",
    "How many days are there in {n} weeks?",
    "Does the passage mention a year? Yes or no.\n\n{passage}",
    # a sentence or two
    'Translate to {language}: "{who} is going to {city} next week to learn about {t}."',
    "Paraphrase in one sentence: {passage}",
    "Write a subject line for an email about {t} to a {job}.",
    "Give me a one-sentence definition of {t}.",
    "Complete: The best thing about {t} is",
    "What is the main idea of this passage? One sentence.\n\n{passage}",
    "Suggest a title for a blog post on {t} for a {job}.",
    "Make this sound friendlier: 'You did not finish the work on {t}.'",
    "Rewrite in the passive voice: {who} wrote a book about {t}.",
    "Who is most affected by {t}? Keep it to one line.",
    "Write a slogan for a company in {city} that deals with {t}.",
    "What does it mean when people say '{t} is not for everyone'?",
    "Summarize in at most {n} words: {passage}",
    "Correct all mistakes: 'she dont knows nothing of {t} and has never went to {city}'.",
    "What is a good question to ask a {job} about {t}?",
    "Turn this into a polite request: send me the report on {t} today.",
    "Reply to this text message in one or two sentences: Hey, are you coming to {city} for the {t} event? {who}",
    "Give two synonyms and an antonym of '{adj}'.",
    "What time is it in {city} when it is noon in London in winter?",
    "Write a tweet of at most 200 characters about {t}.",
    # a paragraph or a short list
    "List {few} benefits of {t}.",
    "What are the most common misunderstandings about {t}?",
    "Explain {t} like I am five.",
    "Give me {few} ideas for presents for a {job} who likes {t}.",
    "Summarise the history of {t} in a paragraph.",
    "What should I pack for a weekend in {city} in November?",
    "How do I politely decline an invitation to an evening about {t}?",
    "What is the difference between {t} and {u}? Answer briefly.",
    "Write a product description of about {fifty} words for something to do with {t}.",
    "{who} is a {job} in {city}. Describe {who}'s morning in a few sentences.",
    "What happens in the body during {t}?",
    "Which {few} skills does a {job} need most, and why?",
    "Why did people start to care about {t}?",
    "How can I explain {t} to my grandmother?",
    "Write a limerick about a {job} from {city}.",
    "Name {few} books one could read to learn about {t}, with a short comment on each.",
    "I have eggs, rice and spinach. What can I cook in twenty minutes?",
    "What are the warning signs of bad advice on {t}?",
    "Write a short thank-you note to {who}, the {job} who helped me with {t}.",
    "Answer from the passage: why did things change? Explain your answer.\n\n{passage}",
    "Convert the following into bullet points.\n\n{passage}",
    "Write a {code} one-liner that reverses a string and say what it does.",
    "What does this command do? grep -rn '{adj}' . | wc -l",
    "Is {t} worth it for a {job}? Give your reasons.",
    "Give me a quick summary of what happened in {city} in the nineteenth century.",
    "How much does it cost to live in {city} for a month, roughly?",
    "A train leaves {city} at 9:15 and takes {n} hours and {m} minutes. When does it arrive? Show the calculation.",
    "{who} has {n} apples and gives a third of them to {other}. How many are left? Think step by step.",
    "Write a dialogue of four lines between {who} and {other} about {t}.",
    "Suggest three names for a cat that belongs to a {job}, with reasons.",
    # long
    "Write a detailed guide to {t} for complete beginners.",
    "Write an article of about 800 words on {t} and its future.",
    "Create a four-week plan to learn about {t}, with tasks for each day.",
    "Write a short story in which a {job} from {city} discovers something about {t}.",
    "Compare {t} and {u} in detail: costs, benefits, risks and alternatives.",
    "You are a {job}. Explain to a class everything you know about {t}.",
    "Write a {code} program that reads a CSV file and prints the average of each column. Explain the code.",
    "Implement a binary search tree in {code} with insert, search and delete.",
    "Discuss the ethical questions of {t} from several points of view.",
    "Draft a cover letter for a {job} who moves from {city} to {city2}.",
    "Write a formal complaint to a company in {city} that sold me something useless for {t}.",
    "Plan a trip of five days to {city} for a family with two children, with times and places.",
    "Give me a list of {many} questions for an interview with a {job}, with good answers.",
    "Explain how {t} works, from the basics to the details an expert would know.",
    "Write a poem of at least twenty lines about {t} and {city}.",
    "Outline a book about {t}: chapters with a short summary of each.",
    "Write the script of a podcast episode in which {who} and {other} discuss {t}.",
    "Describe step by step how to organise a workshop on {t} in {city}.",
    "What are the economic, social and environmental effects of {t}? Discuss each at length.",
    "Design a database for a shop in {city}: tables, columns and example queries.",
    "Write unit tests in {code} for a function that parses dates, and explain each.",
    "Argue against the claim that {t} has made life better. Use at least five arguments.",
    "Write a bedtime story for children about {who}, a {job}, and a talking fox.",
    "List {many} tips for a {job} who wants to learn about {t}, and explain each.",
    "Write a monologue of an old {job} who remembers {city}.",
    "Write a scientific abstract and an introduction for a study about {t}.",
    "Give a full recipe, with quantities and times, for a dinner of three courses from {city}.",
    "Explain the code of a web server in {code} line by line.",
    "Create a table with ten rows about {t}: year, event and importance.",
    "Write a review of a museum of {t} in {city}, with good and bad sides.",
    # open requests in the words of users
    "hey can u tell me about {t}",
    "i need help with {t} pls",
    "Tell me more.",
    "What do you think about {t}?",
    "im a {job} and i want to start with {t}, where do i begin",
    "Can you help me write something for {who}'s birthday? We met in {city}.",
    "why is {t} so {adj}",
    "best {t} for beginners?",
    "My boss wants a presentation on {t} by Friday. Can you give me a structure?",
    "Should I choose {t} or {u}?",
    "what's up",
    "Give me some advice.",
    "Can you recommend something to do in {city} on a rainy day?",
    "I feel tired all the time since I began with {t}. What could be the reason?",
    "how to fix {code} error: index out of range",
    "Tell me about the life of a {job} in {city} a hundred years ago.",
    "Write something funny about {t}.",
    "ok and what about {u}?",
    "What are the rules of {t}?",
    "Explain.",
)


def more_prompts(count: int, seed: int) -> list[tuple[str, int]]:
    """Draw ``count`` different prompts, each with the number of its form, from all forms in turn."""
    draw, found = random.Random(seed), dict[str, int]()
    for turn in range(20 * count):
        if len(found) == count:
            break
        form = turn % len(FORMS)
        found.setdefault(FORMS[form].format(**_filling(draw)), form)
    return list(found.items())


def _filling(draw: random.Random) -> dict[str, object]:
    t, u, v = draw.sample(TOPICS, 3)
    city, city2 = draw.sample(CITIES, 2)
    who, other = draw.sample(PEOPLE, 2)
    return {
        "t": t,
        "T": t[0].upper() + t[1:],
        "u": u,
        "v": v,
        "city": city,
        "city2": city2,
        "who": who,
        "other": other,
        "job": draw.choice(JOBS),
        "language": draw.choice(LANGUAGES),
        "code": draw.choice(CODE),
        "passage": draw.choice(PASSAGES),
        "adj": draw.choice(("popular", "expensive", "useful", "dangerous", "quiet", "hard")),
        "n": draw.randint(3, 30),
        "m": draw.randint(3, 59),
        "big": draw.randint(100, 990),
        "few": draw.choice(("three", "four", "five")),
        "many": draw.choice(("ten", "twelve", "fifteen")),
        "fifty": draw.choice((40, 50, 80)),
    }
