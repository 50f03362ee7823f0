"""All errors and warnings that torchweft raises, in one place.

    WeftError
    ├── UsageError, SpecError, BatchError, ...      arguments and values, at every capability
    ├── ScheduleError, PartitionError, SkipError    pipelines; of several processes: RankFailedError, RankLostError
    ├── LayerInputError, InputWidthError            recurrent networks; NoPlanWarning
    ├── ExpertError                                 errors of an expert, and of the connection to it:
    │   ├── RefusedError                            nothing ran: OverloadError, QuotaError, CommitError, ...
    │   ├── RemoteError                             DeadlineError, LostError, UnreachableError, ForbiddenError, ...
    │   └── GradientError, StepError, TooFewAnswersError, ...
    └── WireError, CheckpointError, DirectoryError  messages, files, and the directory of experts

Each also derives from the built-in error that PyTorch or Python would have raised at that place. `weft.core.errors` and
`weft.experts.errors` describe them. Those of experts and recurrent networks are loaded on first access, so that
importing this module stays cheap.

Example:
    >>> with weft.RemoteExpert("ffn.0", "127.0.0.1:9", timeout=0.5) as expert:
    ...     try:
    ...         expert(torch.ones(1, 2))
    ...     except weft.errors.RefusedError:
    ...         print("nothing ran: try again later")
    ...     except (weft.errors.UnreachableError, weft.errors.DeadlineError) as error:
    ...         print(isinstance(error, OSError))  # they are a ConnectionError and a TimeoutError as well
    True
"""

# ruff: noqa: F403, F405  (`__all__` lists the names of the star import)
from typing import TYPE_CHECKING

from torchweft.core.errors import (
    BackwardTwiceError,
    BatchError,
    DeviceError,
    DoubleBackwardError,
    GuardError,
    InPlaceError,
    ModuleChangedError,
    PartitionError,
    RandomnessError,
    RankFailedError,
    RankLostError,
    ScheduleError,
    SkipError,
    SkipWiringError,
    SpecError,
    SplitError,
    UsageError,
    WeftError,
    WeightsError,
)
from torchweft.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from torchweft.experts.errors import *
    from torchweft.recurrent import InputWidthError, LayerInputError, NoPlanWarning

__all__ = [
    "AlreadyDeclaredError", "AnomalyError", "BackwardTwiceError", "BatchError", "CertificateError", "CheckpointError",
    "ClosedError", "CommitError", "DamagedError", "DeadlineError", "DeviceError", "DeviceLostError", "DirectoryError",
    "DirectoryUnavailableError", "DoubleBackwardError", "DrainingError", "ExpertError", "ExpertFailedError",
    "ExpertOwnedError", "ExpiredError", "FencedError", "ForbiddenError", "FormatError", "GradientError", "GuardError",
    "InPlaceError", "InputWidthError", "InputsGoneError", "KeyReusedError", "LayerInputError", "LeaseLostError",
    "LimitError", "LostError", "MalformedError", "MixtureCommitError", "ModuleChangedError", "ModuleExitError",
    "NoExpertsError", "NoPlanWarning", "NotFiniteError", "NotOwnerError", "OverloadError", "PartitionError",
    "QuotaError", "RandomnessError", "RankFailedError", "RankLostError", "RefusedError", "RemoteError",
    "ResultEvictedError", "ScheduleError", "SkipError", "SkipWiringError", "SpecError", "SplitError", "StepError",
    "StepsLostWarning",
    "TooFewAnswersError", "TooManyRowsError", "TruncatedError", "UnknownExpertError", "UnreachableError", "UsageError",
    "WeftError", "WeightsError", "WireError",
]  # fmt: skip

if not TYPE_CHECKING:
    _recurrent = ("InputWidthError", "LayerInputError", "NoPlanWarning")
    _experts = [name for name in __all__ if name not in globals() and name not in _recurrent]
    __getattr__, __dir__ = lazy_attributes(
        __name__, {"torchweft.experts.errors": _experts, "torchweft.recurrent": _recurrent}
    )
