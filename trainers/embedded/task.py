"""The data that needs no download: support tickets with short structured replies. Standard library only.

Both data sets are generated from fixed seeds. The replies for fine-tuning are terse records; those for pretraining
say the same in prose, so that the base knows the words and the facts but has never seen the format.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

ROWS = 640
PRETRAINING_ROWS = 4096
TYPICAL_LENGTH, LENGTH_SPREAD, MAX_LENGTH = 94, 0.62, 600
"""Of a row's length aimed at, in bytes: the median, the standard deviation of its logarithm, and the cap."""

THINGS = {
    "net": ("router", "modem", "repeater", "hub"),
    "lab": ("printer", "laptop", "monitor", "tablet"),
    "pay": ("invoice", "refund", "voucher", "receipt"),
    "web": ("login", "profile", "mailbox", "calendar"),
}
"""Team to what it looks after."""

_TEAM_AND_THING = [(team, thing) for team, things in THINGS.items() for thing in things]

FAULTS = {
    "net": {
        "drops calls": "update firmware",
        "is slow at night": "change channel",
        "finds no signal": "check the cable",
        "restarts hourly": "swap the adapter",
    },
    "lab": {
        "makes a noise": "clean the fan",
        "stays dark": "send a battery",
        "smells of smoke": "call at once",
        "shows error 42": "factory reset",
    },
    "pay": {
        "was charged twice": "return one charge",
        "has a wrong name": "issue a new copy",
        "never arrived": "send it again",
        "shows an old price": "correct the sum",
    },
    "web": {
        "is locked": "mail an unlock link",
        "lost my settings": "restore backup",
        "asks for a code": "resend the code",
        "is half empty": "clear the cache",
    },
}
"""Team to what its customers report, and what helps."""

URGENCY = {
    "high": (("Urgent!", "Please hurry!", "We cannot work."), "today"),
    "normal": (("Can you help?", "What now?", "Please advise."), "this week"),
    "low": (("No rush.", "It can wait.", "Take your time."), "next month"),
}
"""Level to how a customer says it, and when the answer comes."""

OPENINGS = ("", "", "", "Hello, ", "Hi team, ", "Good morning, ", "Sorry to bother you, but ")
JOINTS = (" Also, ", " And ", " Then ", " Besides, ")
SINCE = ("", "", "", "", "", " again", " since Monday", " since the last update", " for two weeks now")
NAMES = (
    "Ada", "Amir", "Bruno", "Chloe", "Dmitri", "Elif", "Farah", "Goran", "Hanna", "Ines", "Jonas", "Kofi",
    "Lucía", "Maria", "Noor", "Oskar", "Priya", "Quentin", "Rosa", "Søren", "Tomoko", "Uma", "Vera", "Zoë",
)  # fmt: skip


@dataclass(frozen=True)
class Issue:
    """One complaint of a ticket, and what the team does about it."""

    team: str
    thing: str
    fault: str
    fix: str


@dataclass(frozen=True)
class Ticket:
    """What a customer wrote (`text`), and what is to be understood from it."""

    text: str
    name: str
    urgency: str
    issues: tuple[Issue, ...]


def rows() -> list[dict[str, str]]:
    """Return the fine-tuning data: 640 distinct rows of "prompt" and "completion", always the same, in this order."""
    return _rows("fine-tuning", ROWS, _record)


def pretraining_rows() -> list[dict[str, str]]:
    """Return the base's data: 4,096 distinct rows of "prompt" and "completion", with replies in prose."""
    return _rows("pretraining", PRETRAINING_ROWS, _letter)


def _rows(seed: str, count: int, reply: Callable[[Ticket], str]) -> list[dict[str, str]]:
    rng = random.Random(seed)
    replies: dict[str, str] = {}
    while len(replies) < count:
        ticket = _ticket(rng)
        replies[ticket.text] = reply(ticket)
    return [{"prompt": text, "completion": completion} for text, completion in replies.items()]


def _ticket(rng: random.Random) -> Ticket:
    length = min(rng.lognormvariate(math.log(TYPICAL_LENGTH), LENGTH_SPREAD), MAX_LENGTH)
    # 36 bytes frame a row, and each issue adds about 62 to prompt and completion together.
    things = rng.sample(_TEAM_AND_THING, max(1, round((length - 36) / 62)))
    issues = tuple(_issue(rng, team, thing) for team, thing in things)
    name = rng.choice(NAMES)
    urgency = rng.choice(list(URGENCY))
    complaints = [f"my {issue.thing} {issue.fault}{rng.choice(SINCE)}." for issue in issues]
    text = rng.choice(OPENINGS) + complaints[0] + "".join(rng.choice(JOINTS) + c for c in complaints[1:])
    text = f"{text[0].upper()}{text[1:]} {rng.choice(URGENCY[urgency][0])} {name}"
    return Ticket(text, name, urgency, issues)


def _issue(rng: random.Random, team: str, thing: str) -> Issue:
    fault, fix = rng.choice(list(FAULTS[team].items()))
    return Issue(team, thing, fault, fix)


def _record(ticket: Ticket) -> str:
    lines = [f"{issue.team}/{issue.thing}: {issue.fix}" for issue in ticket.issues]
    return "\n".join([f"[{ticket.urgency}] {ticket.name}", *lines])


def _letter(ticket: Ticket) -> str:
    answers = [f"For your {issue.thing}, the {issue.team} team will {issue.fix}." for issue in ticket.issues]
    return " ".join([f"Dear {ticket.name}, you hear from us {URGENCY[ticket.urgency][1]}.", *answers])
