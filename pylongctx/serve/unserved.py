"""What a request asks for and does not get."""

from pylongctx.serve.errors import invalid

SHOWN = 60  # characters of a name or value in messages


class Unserved:
    """Unsupported fields of a request; the policy is ``refuse``, ``warn`` (in a header and the log) or ``ignore``.

    ``notes_content``: whether parts of old turns that cannot be read become notes, else they are refused.
    """

    def __init__(self, policy: str, notes_content: bool = True) -> None:
        self.policy = policy
        self.notes_content = notes_content
        self.found: dict[str, str] = {}  # the reasons by field

    def note(self, name: str, reason: str) -> None:
        """Record a field without effect; ApiError if such fields are refused."""
        if self.policy == "refuse":
            raise invalid(reason, name[:SHOWN])
        self.tell(name, reason)

    def tell(self, name: str, reason: str) -> None:
        """Record what was done in another way."""
        self.found.setdefault(name[:SHOWN], reason)
