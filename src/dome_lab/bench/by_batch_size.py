"""Settings of the questions that are asked at several batch sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from dome_lab.bench.timing import Pace


@dataclass(frozen=True, kw_only=True)
class Config:
    """A network, a rank and batch sizes; ``pace`` is that of one batch size."""

    pace: Pace
    setting: str = "resnet8"
    rank: int = 100
    batch_sizes: Sequence[int] = (16, 128)
    device: str = "cpu"

    def expected_seconds(self, beside: float = 0.0) -> float:
        """About how long all sizes take, with what each takes beside measuring."""
        return len(self.batch_sizes) * (beside + self.pace.seconds)


SMOKE = Config(
    setting="resnet8 on 8x8",
    rank=3,
    batch_sizes=(5,),
    pace=Pace(seconds=0, least=2),
)
