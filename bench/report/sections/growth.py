"""What the curves say: a picture of some, a sentence of each."""

from bench.curves import messages
from bench.curves.subjects import SUBJECTS
from bench.report.markdown import NOT_MEASURED, bullets, picture


def section(results):
    """A sentence a subject, as it stands over its picture."""
    own = {
        name: [curve for curve in results.curves if curve["subject"] == name] for name in SUBJECTS
    }
    said = [messages.of(SUBJECTS[name], curves) for name, curves in own.items() if curves]
    if not said:
        return NOT_MEASURED
    shown = picture("growth", "Costs over size: kvpool, its peers and the floor")
    return "\n\n".join([shown, bullets(f"{line}." for line in said)])
