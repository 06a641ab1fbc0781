"""The ids of a manifest's jobs: of each result, and each claimed by one line."""

from collections.abc import Iterable, Mapping
from typing import Any

from hyimg_cli.errors import HyimgError
from hyimg_cli.manifest.line import fault
from hyimg_cli.manifest.source_ids import request_ids
from hyimg_cli.settings.kinds import is_custom_id
from hyimg_cli.settings.values import shown
from hyimg_cli.spec.job import EDIT_SUFFIXES

_MARKS = tuple(suffix.rpartition(".")[0] for suffix in EDIT_SUFFIXES.values())


def child_ids(fields: Mapping[str, Any]) -> list[str]:
    """Return the ids of the line's pictures: its own id, or one per child for `n` or `seeds`."""
    custom_id = fields["custom_id"]
    if "candidate_of" in fields:  # already one of several results
        return [custom_id]
    count = len(fields["seeds"]) if "seeds" in fields else fields.get("n", 1)
    return [f"{custom_id}-{index}" for index in range(count)] if count > 1 else [custom_id]


class IdClaims:
    """The ids of all jobs; each id belongs to one line."""

    def __init__(self) -> None:
        # The lines of the OpenAI requests, by their custom_ids as written.
        self._requests: dict[str, int] = {}
        self._of_requests: set[int | None] = set()
        # NOTE: some disks treat "Cat.png" and "cat.png" as the same file. Maps each id in lower
        # case to the line that claimed it; the second map has ids that are spelled differently.
        self._line_of: dict[str, int] = {}
        self._spelled: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name.casefold() in self._line_of

    def claim(self, names: Iterable[str], number: int, where: str) -> list[HyimgError]:
        """Claim the ids of a line, or none if one is invalid or taken.

        Returns the fault of the first such id.
        """
        names = dict.fromkeys(names)
        for name in names:
            if not is_custom_id(name):
                what = f'"{name}" has more than 128 characters'
                return [fault("bad-id", what, f"{where}: custom_id")]
            if name in self:
                folded = name.casefold()
                twin, owner = self._spelled.get(folded, folded), self._line_of[folded]
                what = f'"{name}" appears twice'
                if twin != name:
                    what = f'"{name}" and "{twin}" differ only in case'
                hint = f"give each line its own custom_id; line {owner} has this one"
                return [fault("duplicate-id", what, where, hint)]
        for name in names:
            folded = name.casefold()
            if folded == name:
                folded = name  # one text for both
            else:
                self._spelled[folded] = name
            self._line_of[folded] = number
        return []

    def claim_request(self, fields: dict[str, Any], number: int, where: str) -> list[HyimgError]:
        """Claim the ids of an OpenAI request, whose custom_id may be any text.

        Sets `custom_id` in `fields`: the text itself, unless it cannot name a job or another
        request has it as an id or a file; then its valid characters with a digest. Returns a fault
        if another line has the same text.
        """
        text = fields["custom_id"]
        owner = self._requests.setdefault(text, number)
        if owner != number:
            hint = f"give each request its own custom_id; line {owner} has this one"
            return [fault("duplicate-id", f"{shown(text)} appears twice", where, hint)]
        self._of_requests.add(number)
        names: list[str] = []
        for fields["custom_id"] in request_ids(text):
            names = [fields["custom_id"], *child_ids(fields)]
            if all(map(self._is_open, names)):
                break
        return self.claim(names, number, where)

    def _is_open(self, name: str) -> bool:
        """Return True if a request can have this id, or must be refused for it.

        That is if the id is valid, and no other request has it, or a file that is named like it.
        """
        beside = [name + mark for mark in _MARKS]
        beside += [name.removesuffix(mark) for mark in _MARKS if name.endswith(mark)]
        owners = [self._line_of.get(one.casefold()) for one in (name, *beside)]
        return is_custom_id(name) and self._of_requests.isdisjoint(owners)
