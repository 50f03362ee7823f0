"""Fencing tokens: in which life of the directory one was granted, and when in that life.

    20 bits   life      a number that the directory draws when it begins
    44 bits   number    the revision of the claim, which only grows in one life

    7/2003  <  7/2010        in one life the larger token is the later owner's
    7/2003  ?  9/120         the directory lost all it knew and began anew, or is another one: no number tells which is
                             later. Only the directory does, by what it grants and names now

So a token of another life than that of the owner who is known is refused, in both directions, until both sides have
heard the directory. Life 0 is that of tokens from elsewhere, such as a test: only their numbers are compared.
"""

import secrets

_BITS = 44
_NUMBERS = (1 << _BITS) - 1
_LIVES = 1 << 20


def new_life() -> int:
    """A number for a directory that begins; never 0."""
    return 1 + secrets.randbelow(_LIVES - 1)


def token_of(life: int, number: int) -> int:
    """The token that was granted in this life at this revision. It is below 2**64."""
    return (life % _LIVES) << _BITS | number


def life_of(token: int) -> int:
    """In which life it was granted; 0: not known."""
    return token >> _BITS


def number_of(token: int) -> int:
    """The part of a token that people are told: it grows at every claim in one life."""
    return token & _NUMBERS


def later(token: int, known: int) -> bool:
    """Whether ``token`` is surely of a later owner than ``known``: larger, and of the same life."""
    return life_of(token) == life_of(known) and token > known


def replaced(token: int, known: int) -> bool:
    """Whether who knows of an owner with token ``known`` is to refuse one with ``token``. Nobody is known by 0."""
    lives = life_of(token), life_of(known)
    return number_of(token) < number_of(known) if 0 in lives or lives[0] == lives[1] else True
