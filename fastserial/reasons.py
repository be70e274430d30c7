"""Why a save or a load was not done in the fastest manner, and what a user can do about it."""

from __future__ import annotations

# Remedies that several reasons share.
GIVE_A_PATH = (
    "give torch.save a path, or a plain file object; Lightning: plugins=[FastCheckpointIO()]"
)
A_FILE = "save to a file on a disk"
ANOTHER_OWNER = "save into a directory of this user's, or as the file's owner"
RENAMES = "save to a directory where files can be renamed"
QUICKER = "none needed: it is quicker"
ASKED = "none needed: the program asked for it"
ASKED_ONCE = "none needed: later ones there use the page cache at once"
SEE_DOCTOR = "see `fastserial doctor FOLDER`"


class Reason(str):
    """A reason as text, which knows its remedy.

    Reason("the file is locked", "end the lock before the file is saved to").remedy

    Attributes:
        remedy: what a user can do; None: nothing.
    """

    remedy: str | None

    def __new__(cls, text: str, remedy: str | None = None) -> Reason:
        made = super().__new__(cls, text)
        made.remedy = remedy
        return made

    @property
    def with_remedy(self) -> str:
        """The reason, and what to do about it in parentheses."""
        return f"{self} ({self.remedy})" if self.remedy else str(self)
