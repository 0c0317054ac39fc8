"""Models of huggingface.co, in the cache that huggingface_hub shares with other programs."""

from dataclasses import dataclass
from pathlib import Path

from pylongctx.catalog import huggingface
from pylongctx.catalog.entry import OFFLINE, CatalogEntry, Progress, check_sha256, sha256_of


@dataclass(frozen=True, kw_only=True)
class HubEntry(CatalogEntry):
    """A file of a repository.

    Attributes
    ----------
    repo_id, revision : str
        The repository and its commit.
    """

    repo_id: str
    revision: str

    @property
    def origin(self) -> str:
        """The site of its source."""
        return "Hugging Face"

    @property
    def source(self) -> str:
        """The repository."""
        return f"{self.repo_id} at {self.revision[:7]}"

    def path(self) -> Path | None:
        """Return the file in the cache; None if it is missing or huggingface_hub is not installed."""
        return huggingface.cached(self.repo_id, self.file, self.revision)

    def fetch(self, progress: Progress | None = None) -> Path:
        """Download the file with huggingface_hub, which shows progress and resumes interrupted downloads."""
        try:
            path = huggingface.download(self.repo_id, self.file, self.revision)
        except ConnectionError as reason:
            raise ConnectionError(f"{self.name}: {reason}. {OFFLINE}") from reason
        try:
            check_sha256(sha256_of(path), self.sha256, self.file)
        except ValueError:
            path.resolve().unlink()  # the target of the cache's symlink
            path.unlink(missing_ok=True)
            raise
        return path
