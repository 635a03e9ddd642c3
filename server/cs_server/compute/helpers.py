"""Helpers: threads that carry out kernels for a program, one for each lane after the first.

A helper is compiled code that never needs the GIL. It waits for a call, first by looking, then asleep in a futex. The
program hands it the call and does its own share meanwhile. Then it joins: if the helper has not begun, because other
processes use the processors, the program makes the call itself. An atomic exchange of one word decides who makes it, so
it is made once. This module knows no lanes and no commits.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from functools import cache

import numpy as np

from . import object_loader

__all__ = ["DECLARATIONS", "Helper"]

# The words of a helper: how many calls were handed over, the last one that somebody has begun, and the last one that
# the helper has done; of the present call its status, its function and its words; whether the helper is to end; and the
# address of the C function ``syscall``.
_HANDED, _BEGUN, _DONE, _STATUS, _FUNCTION, _WORDS, _ENDS, _SYSCALL, _COUNT = range(9)

# A futex is the lower half of a word. Nobody else maps the words of a helper.
_FUTEX = {"x86_64": 202}.get(platform.machine(), 98)
_WAIT, _WAKE = 128, 129

# So often a thread looks at a word before it sleeps: about ten microseconds.
_LOOKS = 1 << 14


class Helper:
    """A thread that makes the calls that a program hands to it by `Op.HAND`, until `close`."""

    def __init__(self) -> None:
        words = np.zeros(_COUNT, np.int64)
        words[_SYSCALL] = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0
        self._words = words
        #: Of its words, for instructions of programs.
        self.address: int = words.ctypes.data
        self._wake, follow = _compiled(_WAKE_CODE)(words), _compiled(_FOLLOW_CODE)(words)
        # It holds nothing that must be given back, so a process may end beside it.
        self._thread = threading.Thread(target=follow.status, name="helper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._words[_ENDS] = 1
        self._wake()
        self._thread.join()


def hand(address: int, call: int) -> None:
    """As `Op.HAND`, but nobody makes the call before `join`."""
    words = _words_at(address)
    words[_FUNCTION], words[_WORDS] = (ctypes.c_int64 * 2).from_address(call)
    words[_BEGUN] = words[_HANDED] + 1
    words[_HANDED] += 1


def join(address: int) -> int:
    """As `Op.JOIN` after `hand`. Returns the status of the call."""
    words = _words_at(address)
    return object_loader.call(words[_FUNCTION], words[_WORDS])


def _words_at(address: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * _COUNT).from_address(address)


@cache
def _compiled(code: str) -> object_loader.Bind:
    return object_loader.assembled(DECLARATIONS + code)


_FIELDS = {
    name: f"getelementptr i64, ptr %helper, i64 {place}"
    for name, place in {
        "handed": _HANDED,
        "begun": _BEGUN,
        "done": _DONE,
        "status": _STATUS,
        "function": _FUNCTION,
        "words": _WORDS,
        "ends": _ENDS,
        "syscall": _SYSCALL,
    }.items()
}

DECLARATIONS = """
; Wait until a word of the helper differs from %old.
define internal void @await(ptr %helper, ptr %word, i64 %old) {{
entry:
  %syscall.at = {syscall}
  br label %look
look:
  %looks = phi i64 [ 0, %entry ], [ %looks.next, %again ]
  %now = load atomic volatile i64, ptr %word acquire, align 8
  %is.other = icmp ne i64 %now, %old
  br i1 %is.other, label %over, label %again
again:
  %looks.next = add i64 %looks, 1
  %is.patient = icmp ult i64 %looks.next, {looks}
  br i1 %is.patient, label %look, label %sleep
sleep:
  %syscall = load ptr, ptr %syscall.at
  %half = and i64 %old, 4294967295
  %slept = call i64 (i64, ...) %syscall(i64 {futex}, ptr %word, i64 {wait}, i64 %half, ptr null)
  %later = load atomic volatile i64, ptr %word acquire, align 8
  %is.changed = icmp ne i64 %later, %old
  br i1 %is.changed, label %over, label %sleep
over:
  ret void
}}

; Wake whoever waits for a word of the helper.
define internal void @wake(ptr %helper, ptr %word) {{
  %syscall.at = {syscall}
  %syscall = load ptr, ptr %syscall.at
  %woken = call i64 (i64, ...) %syscall(i64 {futex}, ptr %word, i64 {wake}, i64 1)
  ret void
}}

; Make the call with this number, if nobody has begun it; whether this thread has made it.
define internal i1 @make(ptr %helper, i64 %number, ptr %result, ptr %raised) {{
  %begun.at = {begun}
  %before = sub i64 %number, 1
  %exchanged = cmpxchg ptr %begun.at, i64 %before, i64 %number seq_cst seq_cst
  %is.mine = extractvalue {{ i64, i1 }} %exchanged, 1
  br i1 %is.mine, label %mine, label %theirs
mine:
  %function.at = {function}
  %words.at = {words}
  %status.at = {status}
  %function = load ptr, ptr %function.at
  %words = load ptr, ptr %words.at
  %returned = call i32 %function(ptr %result, ptr %raised, ptr %words)
  %status = sext i32 %returned to i64
  store i64 %status, ptr %status.at
  ret i1 true
theirs:
  ret i1 false
}}

define internal void @hand(ptr %helper, ptr %call) {{
  %handed.at = {handed}
  %function.at = {function}
  %words.at = {words}
  %second = getelementptr i64, ptr %call, i64 1
  %function = load i64, ptr %call
  %words = load i64, ptr %second
  store volatile i64 %function, ptr %function.at
  store volatile i64 %words, ptr %words.at
  %before = load i64, ptr %handed.at
  %number = add i64 %before, 1
  store atomic volatile i64 %number, ptr %handed.at seq_cst, align 8
  call void @wake(ptr %helper, ptr %handed.at)
  ret void
}}

define internal i32 @join(ptr %helper, ptr %result, ptr %raised) {{
entry:
  %handed.at = {handed}
  %done.at = {done}
  %status.at = {status}
  %number = load i64, ptr %handed.at
  %is.mine = call i1 @make(ptr %helper, i64 %number, ptr %result, ptr %raised)
  br i1 %is.mine, label %over, label %look
look:
  %done = load atomic volatile i64, ptr %done.at acquire, align 8
  %is.done = icmp eq i64 %done, %number
  br i1 %is.done, label %over, label %wait
wait:
  call void @await(ptr %helper, ptr %done.at, i64 %done)
  br label %look
over:
  %status = load i64, ptr %status.at
  %short = trunc i64 %status to i32
  ret i32 %short
}}
""".format(looks=_LOOKS, futex=_FUTEX, wait=_WAIT, wake=_WAKE, **_FIELDS)
"""What programs and helpers do with the words of a helper, in LLVM's language."""

_FOLLOW_CODE = """
define i32 @{symbol}(ptr %result, ptr %raised, ptr %given) {{
entry:
  %helper = load ptr, ptr %given
  %handed.at = {handed}
  %done.at = {done}
  %ends.at = {ends}
  br label %next
next:
  %seen = phi i64 [ 0, %entry ], [ %number, %take ], [ %number, %tell ]
  call void @await(ptr %helper, ptr %handed.at, i64 %seen)
  %number = load atomic volatile i64, ptr %handed.at acquire, align 8
  %ends = load atomic volatile i64, ptr %ends.at acquire, align 8
  %is.over = icmp ne i64 %ends, 0
  br i1 %is.over, label %over, label %take
take:
  %is.mine = call i1 @make(ptr %helper, i64 %number, ptr %result, ptr %raised)
  br i1 %is.mine, label %tell, label %next
tell:
  store atomic volatile i64 %number, ptr %done.at seq_cst, align 8
  call void @wake(ptr %helper, ptr %done.at)
  br label %next
over:
  ret i32 0
}}
""".format(symbol=object_loader.SYMBOL, **_FIELDS)

_WAKE_CODE = """
define i32 @{symbol}(ptr %result, ptr %raised, ptr %given) {{
  %helper = load ptr, ptr %given
  %handed.at = {handed}
  %before = load i64, ptr %handed.at
  %number = add i64 %before, 1
  store atomic volatile i64 %number, ptr %handed.at seq_cst, align 8
  call void @wake(ptr %helper, ptr %handed.at)
  ret i32 0
}}
""".format(symbol=object_loader.SYMBOL, **_FIELDS)
