"""Skip connections of any length, declared by the layers that stash and pop.

    @skippable(stash=["early"])           @skippable(pop=["early"])
    class Encoder(nn.Module):             class Decoder(nn.Module):
        def forward(self, x):                 def forward(self, x):
            yield stash("early", x)               early = yield pop("early")
            return self.conv(x)                   return self.conv(x) + early

The layers stand in an `nn.Sequential`, which runs as it is, on one device, or in a Pipe, over several.
"""

from torchweft.pipeline.skip.layout import SkipLayout, inspect_skip_layout, verify_skippables
from torchweft.pipeline.skip.skippable import Skippable, pop, skippable, stash
from torchweft.pipeline.skip.tracker import Namespace, SkipTracker, current_skip_tracker, use_skip_tracker

__all__ = [
    "Namespace", "SkipLayout", "SkipTracker", "Skippable", "current_skip_tracker", "inspect_skip_layout", "pop",
    "skippable", "stash", "use_skip_tracker", "verify_skippables",
]  # fmt: skip
