"""Contrast of two colours by WCAG 2, also for readers with a colour vision deficiency."""

from collections.abc import Sequence

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, for
# the full deficiency. The matrices apply to linear RGB.
VISION: dict[str, Sequence[Sequence[float]]] = {
    "trichromacy": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def luminance(colour: str, vision: str = "trichromacy") -> float:
    """The relative luminance of a colour such as #2f6fb0."""
    encoded = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in encoded]
    seen = [min(1.0, max(0.0, sum(m * x for m, x in zip(row, linear, strict=True)))) for row in VISION[vision]]
    return 0.2126 * seen[0] + 0.7152 * seen[1] + 0.0722 * seen[2]


def contrast(one: str, other: str, vision: str = "trichromacy") -> float:
    darker, lighter = sorted((luminance(one, vision), luminance(other, vision)))
    return (lighter + 0.05) / (darker + 0.05)


def least_contrast(one: str, other: str) -> float:
    """The smallest contrast over all kinds of vision."""
    return min(contrast(one, other, vision) for vision in VISION)
