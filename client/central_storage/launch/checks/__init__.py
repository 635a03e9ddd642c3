"""Checks of this machine, for ``cs-ctl doctor``: one module for each subject. Nothing here starts a service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from cs_proto.frozen import with_changes

from . import gpus, kernel, limits, memory, places, processors, software
from .finding import Finding, bad, hider

__all__ = ["CHECKS", "findings", "hidden", "lines", "summary"]

#: All checks, in the order in which they are reported.
CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    software.versions,
    kernel.release,
    kernel.features,
    kernel.clock,
    processors.kind,
    processors.mailboxes,
    processors.cores,
    processors.nodes,
    processors.library_threads,
    memory.amount,
    memory.swap,
    memory.mapping_limits,
    memory.shared_memory_files,
    memory.huge_pages,
    limits.descriptors,
    limits.locked_memory,
    places.run_directories,
    places.kernel_cache,
    gpus.driver,
    gpus.cupy,
    software.container,
    software.engine,
)


def findings() -> Iterator[Finding]:
    """What all checks find, one after the other, without secrets (see :func:`~.finding.hider`)."""
    hide = hider()
    for check in CHECKS:
        try:
            for finding in check():
                yield hidden(finding, hide)
        except (OSError, ValueError) as error:  # a file of /proc is not there, or says something unexpected
            subject = check.__name__.replace("_", " ")
            yield hidden(bad(subject, f"cannot be checked ({error})", "mount /proc and /sys as usual"), hide)


def hidden(finding: Finding, hide: Callable[[str], str]) -> Finding:
    """A finding without secrets."""
    return with_changes(finding, text=hide(finding.text), remedy=hide(finding.remedy))


def lines(finding: Finding) -> list[str]:
    """A finding as lines of a report.

    Examples:
        >>> from central_storage.launch.checks.finding import slower
        >>> print(*lines(slower("CS_MAILBOXES", "off", "unset it")), sep="\\n")
        slower  CS_MAILBOXES: off
                remedy: unset it
    """
    head = f"{finding.level:<6}  {finding.subject}: {finding.text}"
    return [head, f"        remedy: {finding.remedy}"] if finding.remedy else [head]


def summary(found: Sequence[Finding]) -> str:
    """The last line of a report.

    Examples:
        >>> from central_storage.launch.checks.finding import bad, good
        >>> summary([good("swap", "none"), bad("threads", "too many", "unset it")])
        'bad: 1, slower: 0, good: 1'
    """
    counts = Counter(finding.level for finding in found)
    return ", ".join(f"{level}: {counts[level]}" for level in ("bad", "slower", "good"))
