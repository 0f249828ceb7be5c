"""What the papers claim, and what was measured of it here: a list of claims for each page."""

from benchmarks.report.papers import flexicache, mosaickv, redknot, sparsex, survey
from benchmarks.report.papers.claims import Claim

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "sparsex": sparsex.CLAIMS,
    "redknot": redknot.CLAIMS,
    "flexicache": flexicache.CLAIMS,
    "mosaickv": mosaickv.CLAIMS,
    "survey": survey.CLAIMS,
}
"""By the name of the page in `docs/papers`."""
