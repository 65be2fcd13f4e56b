"""What is asked in the chats that SmolLM2's exits learn from: openly licensed passages in templates, and everyday requests.

A list of messages follows from the seed and the passages alone, and no message is in it twice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

PASSAGES = (
    "Explain in simple words: {passage}",
    "Summarise this in one or two sentences:\n\n{passage}",
    "Write a short story that begins: {passage}",
    "Continue: {passage}",
    "Give three questions about this text, with answers:\n\n{passage}",
    "Rewrite this more simply, for a child of ten:\n\n{passage}",
    "What is the main idea here?\n\n{passage}",
    "List the key points of the following text.\n\n{passage}",
    "{passage}\n\nWhy does this matter?",
    "Suggest a title for this text and say why it fits: {passage}",
    "Write an email to a friend about this: {passage}",
)
NAMES = (
    "What is {name}?",
    "Tell me something about {name}.",
    "Explain {name} to someone who has never heard of it.",
)
"""Asked where a passage has a name in it."""
NAMED = 0.2
"""The part of the passages whose name is asked for, where they have one."""
EVERYDAY = 0.25
"""The part of all messages that are everyday requests, for as long as there are new ones."""

REQUESTS = (
    "Give me five tips about {topic}.",
    "Write a short poem about {topic}.",
    "What should a beginner know about {topic}?",
    "Explain {topic} like I am five years old.",
    "What are the advantages and disadvantages of {topic}?",
    "Write a short story about {topic}.",
    "I am new to {topic}. Where do I start?",
    "Make a list of ten words that have to do with {topic}.",
    "How did {topic} change over the last hundred years?",
    "Write a dialogue between two friends about {topic}.",
    "What are common mistakes with {topic}, and how can I avoid them?",
    "Give me three fun facts about {topic}.",
    "Write an email to my teacher about {topic}.",
    "Can you recommend a weekly plan for {topic}?",
    "What questions would you ask an expert on {topic}?",
    "Write a short speech about {topic}.",
    "Compare {topic} with reading a book.",
    "Why do people like {topic}?",
    "Write a product description that has to do with {topic}.",
    "How much does {topic} cost, and how can I save money?",
    "Describe {topic} in three sentences.",
    "Is {topic} good for my health?",
    "Write a Python function that prints a fact about {topic}.",
    "Make a quiz of three questions about {topic}.",
    "Help me write a birthday card for someone who loves {topic}.",
    "What equipment do I need for {topic}?",
    "Write a haiku about {topic}.",
    "How do I explain {topic} to my grandmother?",
    "What jobs have to do with {topic}?",
    "Give me a step-by-step guide to {topic}.",
)
PLAIN = (
    "Hello! Who are you?",
    "Hi, how are you today?",
    "Tell me a joke.",
    "What is the capital of France?",
    "What is the capital of Italy, and what is it known for?",
    "How do I boil an egg?",
    "What is 12 times 7?",
    "Write a limerick about a cat.",
    "How many days are there in a leap year?",
    "Why is the sky blue?",
    "How does a rainbow form?",
    "What is the difference between weather and climate?",
    "Give me an idea for dinner tonight.",
    "How can I sleep better?",
    "Translate 'good morning' into French and Spanish.",
    "Write a thank-you note to my neighbour.",
    "What is photosynthesis?",
    "How does the internet work?",
    "Write a function in Python that adds two numbers.",
    "What is a prime number? Give examples.",
    "How do I stop procrastinating?",
    "What are the planets of the solar system?",
    "Write a motivational quote.",
    "How do vaccines work?",
    "What does 'break a leg' mean?",
    "Give me three synonyms for 'happy'.",
    "How do I write a good CV?",
    "What should I see in London in two days?",
    "Write the first paragraph of a detective novel.",
    "What is the speed of light?",
)
TOPICS = (
    "gardening", "baking bread", "learning to swim", "playing chess", "hiking in the mountains", "photography",
    "keeping a dog", "keeping bees", "learning the guitar", "painting with watercolours", "saving money", "running",
    "public speaking", "learning a foreign language", "astronomy", "the ocean", "volcanoes", "dinosaurs", "whales",
    "solar energy", "electric cars", "trains", "bicycles", "sailing", "cooking for friends", "making coffee", "tea",
    "chocolate", "cheese", "growing tomatoes", "birdwatching", "fishing", "camping", "knitting", "woodworking",
    "repairing old furniture", "writing a diary", "board games", "football", "tennis", "yoga", "meditation", "dancing",
    "jazz", "classical music", "old films", "comic books", "science fiction", "fairy tales", "poetry", "museums",
    "the Roman Empire", "ancient Egypt", "the Moon", "robots", "computer programming", "video games", "mathematics",
    "the human heart", "sleep", "dreams", "friendship", "moving to a new city", "a job interview", "working from home",
    "raising children", "getting a pet cat", "winter", "rainy days", "the seasons", "recycling", "clean water",
    "public libraries", "maps", "clocks", "bridges", "lighthouses", "hot-air balloons", "kites", "snow",
)  # fmt: skip

_NAME = re.compile(r"(?<=[a-z,] )(?!I\b)[A-Z][a-z]+(?: (?:of |the )?[A-Z][a-z]+){0,3}")
"""Words with capitals, not where a sentence begins."""


def messages(passages: Iterator[str], seed: int) -> Iterator[str]:
    """What a user says, message by message, until there are no passages left."""
    draw = random.Random(seed)
    everyday = [request.format(topic=topic) for request in REQUESTS for topic in TOPICS] + list(PLAIN)
    draw.shuffle(everyday)
    said: set[str] = set()
    while True:
        if everyday and draw.random() < EVERYDAY:
            yield everyday.pop()
            continue
        passage = next(passages, None)
        if passage is None:
            return
        message = about(passage, draw)
        if message not in said:
            said.add(message)
            yield message


def about(passage: str, draw: random.Random) -> str:
    """One message about a passage: of a name in it at times, else of all of it."""
    names = _NAME.findall(passage)
    if names and draw.random() < NAMED:
        return draw.choice(NAMES).format(name=draw.choice(names))
    return draw.choice(PASSAGES).format(passage=passage)


def passage_of(text: str, shortest: int = 80, *, inside: bool = False) -> str | None:
    """A beginning of a document as something to talk about: to its last whole sentence, or to its last whole word. Text from
    `inside` a document begins with its first whole sentence. None where that is nearly nothing."""
    text = " ".join(text.replace("\ufffd", "").split())
    ends = [found.end() for found in re.finditer(r"[.!?](?=\s)", text)]
    if inside:
        if not ends:
            return None
        text, ends = text[ends[0] :].lstrip(), [end - ends[0] - 1 for end in ends[1:]]
    cut = next((end for end in reversed(ends) if end >= shortest), None)
    passage = text[:cut] if cut is not None else text.rsplit(" ", 1)[0]
    return passage if len(passage) >= shortest else None


def shuffled(count: int, seed: int) -> Sequence[int]:
    """All numbers below `count` in an order of the seed."""
    order = list(range(count))
    random.Random(f"documents {seed}").shuffle(order)
    return order
