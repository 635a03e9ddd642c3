"""``cs-launch`` as its users meet it: words, exit codes, signals; with stand-ins for server and workers."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.client.launch.standins import wait_gone
from tests.harness import processes
from tests.harness.processes import Child, Ended
from tests.harness.timing import unit

from central_storage.launch import cli
from central_storage.launch.run_directory import RunDirectory

Launch = Callable[..., AbstractContextManager[Child]]

#: A script that waits until its service is up, as a client does.
CONNECT = """
import os, signal, socket, sys, time
from cs_proto.codec import decode, encode
from cs_proto.messages import PROTOCOL, Introduce
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(os.environ["CS_ADDRESS"] + "/supervisor")
link.send(b"".join(encode(Introduce(PROTOCOL, "controller", 0, 1, os.getpid()))))
link.recv(1 << 17)  # the name
first = decode([link.recv(1 << 17)])
os.write(1, f"{type(first).__name__}\\n".encode())  # one write: lines of other processes come between two
"""
AS_MODULE = (sys.executable, "-m", "central_storage.launch.cli")


@pytest.fixture
def launch(tmp_path: Path, standins: Callable[..., dict[str, str]]) -> Launch:
    """Start ``cs-launch`` on a script given as text, with stand-ins that run the code given by label."""

    def start(script: str, *options: str, **code: str) -> AbstractContextManager[Child]:
        (tmp_path / "script.py").write_text(script)
        arguments = (*AS_MODULE, "--devices", "cpu:0,cpu:1", *options, "script.py", "an", "--argument")
        return processes.start(*arguments, environment={**standins(**code), "CS_LOG_DIR": None}, directory=tmp_path)

    return start


@pytest.fixture
def ended(launch: Launch) -> Callable[..., Ended]:
    """As ``launch``, to the end; nothing may be left."""

    def run(script: str, *options: str, **code: str) -> Ended:
        with launch(script, *options, **code) as child:
            result = child.wait()
            assert child.left(unit(5)) == []
            return result

    return run


def test_the_script_runs_once_and_is_told_where_its_service_is(ended: Callable[..., Ended]) -> None:
    result = ended(
        CONNECT
        + "print(sys.argv[1:], os.environ['CS_DEVICES'], os.environ['CS_PARAMETER_DEVICE'], os.environ.get('RANK'))\n"
        + "print(os.environ['CS_RUN_DIRECTORY'] == os.environ['CS_ADDRESS'])",
        "--parameter-device",
        "/CPU:3",
    )
    assert result.code == 0, result
    assert result.lines == ["Serving", "['an', '--argument'] cpu:0,cpu:1 cpu:3 None", "True"]
    first, *others = result.err.splitlines()
    assert re.fullmatch(
        r"run [0-9a-f]{8}: 1 script, 2 workers \(cpu:0, cpu:1\), parameters on cpu:3, "
        r"transport ipc \+ mailboxes \+ shared memory \(memfd\), directory /\S+/cs-[0-9a-f]{8}",
        first,
    )
    assert others == []
    assert not Path(first.split()[-1]).exists()


def test_lines_carry_their_process_and_log_files_are_kept_where_asked(
    ended: Callable[..., Ended], tmp_path: Path
) -> None:
    code = {"w1": "print('one'); print('no end', end='')", "server": "sys.stderr.buffer.write(b'\\xff!\\n')"}
    result = ended(CONNECT, "--log-dir", "logs", **code)
    assert result.code == 0
    assert "[w1] one" in result.lines
    assert "[w1] no end" in result.lines
    assert "[server] \ufffd!" in result.err
    (directory,) = (tmp_path / "logs").iterdir()
    assert (directory / "w1.log").read_text() == "one\nno end\n"
    assert f"log files: {directory}" in result.err


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for sockets, which ``tmp_path`` does not in a parallel run."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def test_a_run_directory_may_be_named_and_kept(ended: Callable[..., Ended], short_path: Path) -> None:
    result = ended(CONNECT, "--run-dir", str(short_path / "r"), "--keep-run-directory", w0="print('hello')")
    assert result.code == 0, result
    assert [str(path.relative_to(short_path / "r")) for path in (short_path / "r").rglob("*.log")] == ["logs/w0.log"]
    assert not (short_path / "r" / "lock").exists()


def test_two_launches_at_once_do_not_meet(launch: Launch) -> None:
    with launch(CONNECT + "link.recv(1)") as one:
        one.wait_for("Serving")
        with launch(CONNECT) as other:
            assert other.wait().code == 0
        assert len(one.processes()) == 5
        one.signal(signal.SIGTERM)
        assert one.wait().code == 143


# --- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with three GPUs, of which the user sees the last and the first."""
    for number in range(3):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    return {"CS_NVIDIA_DRIVER": str(tmp_path / "gpus"), "CUDA_VISIBLE_DEVICES": "2,0", "CS_LOG_DIR": ""}


@pytest.fixture
def on_gpus(
    gpus: dict[str, str], tmp_path: Path, standins: Callable[..., dict[str, str]]
) -> Callable[..., AbstractContextManager[Child]]:
    """Start ``cs-launch`` with these options there, without CuPy unless ``cupy``; everybody says which GPUs he sees."""

    def start(*options: str, cupy: bool) -> AbstractContextManager[Child]:
        see = "seen = os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('CS_GPUS')\n"
        see += "os.write(1, 'sees {} {}\\n'.format(*seen).encode())\n"
        environment = standins(server=see, w0=see, w1=see) | gpus
        (tmp_path / "standins" / "cupy.py").touch()
        if not cupy:  # nor the real one, where it is installed
            (tmp_path / "standins" / "sitecustomize.py").write_text("import sys; sys.modules['cupy'] = None")
        (tmp_path / "script.py").write_text(CONNECT + see)
        return processes.start(*AS_MODULE, *options, "script.py", environment=environment, directory=tmp_path)

    return start


def test_each_worker_sees_its_gpu_and_the_server_none(on_gpus: Callable[..., AbstractContextManager[Child]]) -> None:
    with on_gpus("--devices", "gpu:all", "--parameter-device", "cpu:0", cupy=True) as child:
        result = child.wait()
    assert result.code == 0, result
    assert "2 workers (gpu:0, gpu:1), parameters on cpu:0" in result.err
    assert sorted(result.lines) == ["Serving", "[server] sees  ", "[w0] sees 2 0", "[w1] sees 0 1", "sees 2,0 None"]


def test_gpus_without_cupy_are_2_before_anything_starts(
    on_gpus: Callable[..., AbstractContextManager[Child]],
) -> None:
    with on_gpus("--devices", "auto", cupy=False) as child:
        result = child.wait()
    assert (result.code, result.lines) == (2, []), result
    (line,) = result.err.splitlines()
    assert line.startswith("cs-launch: error: gpu:0 needs CuPy: pip install 'central-storage[cuda12]' or")


CHOOSE = CONNECT.replace(
    "link.send(", "link.send(b''.join(encode(DeviceChoice(('cpu:0', 'cpu:1'), 'cpu:0'))))\nlink.send(", 1
).replace("import PROTOCOL", "import PROTOCOL, DeviceChoice")


def test_a_script_chooses_its_devices_where_the_command_line_names_none(
    on_gpus: Callable[..., AbstractContextManager[Child]], tmp_path: Path
) -> None:
    with on_gpus(cupy=False) as child:  # the GPUs of the default cannot be used
        (tmp_path / "script.py").write_text(CHOOSE)
        result = child.wait()
    assert result.code == 0, result
    assert "Serving" in result.lines
    (banner,) = result.err.splitlines()
    assert "1 script, 2 workers (cpu:0, cpu:1), parameters on cpu:0" in banner


@pytest.mark.parametrize("memory", ["memfd", "files"])
def test_what_stood_by_for_the_choice_leaves_no_trace(
    standins: Callable[..., dict[str, str]], tmp_path: Path, memory: str
) -> None:
    (tmp_path / "script.py").write_text(CHOOSE + "sys.exit(7)")
    environment = standins(w0="print('one of', os.environ['WORLD_SIZE'], flush=True)") | {"CS_LOG_DIR": ""}
    arguments = (
        "--memory",
        memory,
        *(("--run-dir", "/dev/shm/cs-choice-" + str(os.getpid())) if memory == "files" else ()),
    )
    result = processes.run(*AS_MODULE, *arguments, "script.py", environment=environment, directory=tmp_path)
    assert result.code == 7
    assert result.lines == ["Serving", "[w0] one of 2"] or result.lines == ["[w0] one of 2", "Serving"], result
    assert result.err.count("1 script, ") == 1


def test_a_process_that_stands_by_becomes_what_the_script_chooses(
    standins: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(CHOOSE)
    told = "print(*sys.orig_argv[3:5], sys.stdin.read() == '', os.environ['WORLD_SIZE'], file=sys.stderr, flush=True)"
    environment = standins(w0=told) | {"CS_LOG_DIR": ""}
    result = processes.run(*AS_MODULE, "script.py", environment=environment, directory=tmp_path)
    assert result.code == 0, result
    assert "[w0] cs_runtime.standby cs_worker True 2" in result.err.splitlines()


def test_a_script_that_makes_no_strategy_leaves_nothing_that_stands_by(
    standins: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("print('done')")
    with processes.start(
        *AS_MODULE, "script.py", environment=standins() | {"CS_LOG_DIR": ""}, directory=tmp_path
    ) as child:
        result = child.wait()
        assert child.left(unit(5)) == []
    assert (result.code, result.lines, result.err) == (0, ["done"], "")


# --- exit codes and the first failure -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError('mine')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR2)", 128 + signal.SIGUSR2),
    ],
)
def test_the_scripts_code_is_the_launchers(ended: Callable[..., Ended], script: str, code: int) -> None:
    result = ended(script)
    assert result.code == code, result
    assert bool(code) == bool(re.search(r"\[cs-launch\] the script \(pid \d+\) ended by (exit code|SIG)", result.err))


def test_a_failed_start_is_3_with_the_last_lines(ended: Callable[..., Ended]) -> None:
    script = CONNECT + "print(first.error.message); sys.exit(1)"
    result = ended(script, w1="print('what went wrong', file=sys.stderr); sys.exit(5)")
    assert result.code == 3
    assert "StartFailed" in result.lines
    report = result.err.partition("[cs-launch] ")[2].splitlines()
    assert re.match(r"the service did not start: worker w1 \(pid \d+\) ended by exit code 5", report[0])
    assert report[-1] == "    what went wrong"
    assert "what went wrong" in result.out.splitlines()[-1]


def test_a_start_that_takes_too_long_is_3(ended: Callable[..., Ended]) -> None:
    result = ended(CONNECT + "sys.exit(1)", "--start-timeout", str(unit(0.5)), server="link.recv(1)")
    assert result.code == 3
    assert re.search(rf"not ready within {unit(0.5):g} s: the server \(pid \d+\)", result.err)


#: A victim that lives until the script opens the door, and a script that does so and reads of the death.
DIES = "print('last words'); open('door').read(); os.kill(os.getpid(), signal.SIGKILL)"
SEES = CONNECT + "open('door', 'w').close()\nos.write(1, decode([link.recv(1 << 17)]).cause.encode() + b'\\n')\n"


@pytest.mark.parametrize(
    ("victim", "end", "code"),
    [("w1", "sys.exit(1)", 4), ("server", "sys.exit(1)", 5), ("w1", "sys.exit(9)", 9), ("w0", "", 0)],
)
def test_a_script_that_fails_for_a_death_is_4_or_5_and_its_own_word_counts(
    ended: Callable[..., Ended], tmp_path: Path, victim: str, end: str, code: int
) -> None:
    os.mkfifo(tmp_path / "door")
    result = ended(SEES + end, **{f"{victim}_READY": DIES})
    assert result.code == code, result
    assert "SIGKILL" in result.lines
    who = "server" if victim == "server" else f"worker {victim}"
    report = result.err.partition("[cs-launch] ")[2].splitlines()
    words = "first failure" if code else "the run went on after this"
    assert re.match(rf"{words}: {who} \(pid \d+\) ended by SIGKILL", report[0])
    assert report[1:] == ["    last lines:", "    last words"]


# --- signals --------------------------------------------------------------------------------------------------------

DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def test_ctrl_c_reaches_the_script_and_ends_the_run(launch: Launch) -> None:
    inside = textwrap.indent(f"{CONNECT}\ntime.sleep(600)", "    ")
    script = f"try:\n{inside}\nexcept KeyboardInterrupt: print('tidy', flush=True)"
    with launch(script) as child:
        child.wait_for("Serving")
        begun = time.monotonic()
        child.press_ctrl_c()
        result = child.wait(unit(5))
        assert time.monotonic() - begun < unit(5)
        assert (result.code, result.lines[-1]) == (130, "tidy")
        assert "Traceback" not in result.err
        assert child.left() == []


def test_a_run_that_hears_nothing_ends_within_five_seconds(launch: Launch) -> None:
    with launch(CONNECT + DEAF + "print('deaf', flush=True); time.sleep(600)", w0=DEAF) as child:
        child.wait_for("deaf")
        begun = time.monotonic()
        child.press_ctrl_c()
        assert child.wait().code == 130
        assert time.monotonic() - begun < unit(5)
        assert child.left() == []


def test_a_second_ctrl_c_ends_it_at_once(launch: Launch) -> None:
    script = CONNECT + "signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\nprint('up', flush=True)\n"
    with launch(script + "while True: time.sleep(600)", w0=DEAF) as child:
        child.wait_for("up")
        child.press_ctrl_c()
        child.wait_for("press Ctrl-C again to end it at once", stream="err")
        begun = time.monotonic()
        child.press_ctrl_c()
        assert child.wait().code == 130
        assert time.monotonic() - begun < unit(1)
        assert child.left() == []


def test_sigterm_is_forwarded_at_once_so_that_the_script_can_save(launch: Launch) -> None:
    script = (
        CONNECT + "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\nprint('up', flush=True)\n"
    )
    with launch(script + "time.sleep(600)") as child:
        child.wait_for("up")
        child.signal(signal.SIGTERM)
        result = child.wait(unit(5))
        assert (result.code, result.lines[-1]) == (143, "saved")
        assert child.left() == []


def test_ctrl_c_before_the_service_is_up(launch: Launch) -> None:
    with launch("import time; time.sleep(600)", server="print('starting'); link.recv(1)") as child:
        child.wait_for("starting")
        child.press_ctrl_c()
        result = child.wait(unit(5))
        assert result.code == 130
        assert "failure" not in result.err
        assert child.left() == []


def test_nothing_outlives_a_launcher_that_is_killed(launch: Launch) -> None:
    with launch(CONNECT + "time.sleep(600)", w0=DEAF) as child:
        child.wait_for("Serving")
        pids = [process.pid for process in child.processes()]
        assert len(pids) == 5
        child.signal(signal.SIGKILL)
        child.wait()
        for pid in pids:
            wait_gone(pid, unit(5))
    RunDirectory().remove()  # the next start removes what this one left


def test_stacks_on_request(launch: Launch) -> None:
    with launch(CONNECT + "link.recv(1)") as child:
        child.wait_for("Serving")
        child.signal(signal.SIGUSR1)
        child.wait_for("most recent call first", stream="err")
        child.signal(signal.SIGTERM)
        child.wait()


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no script was given"),
        (["--devices", "cpu:0"], "no script was given"),
        (["--"], "no script was given"),
        (["--", "no_such.py"], "there is no script 'no_such.py' in /"),
        (["--timeline", "/no_such/t.json", __file__], "--timeline /no_such/t.json: there is no directory /no_such"),
        (["no_such.py"], "there is no script 'no_such.py' in /"),
        (["--verbose", "x.py"], "unrecognized arguments: --verbose"),
        (["--dev", "cpu:0", "x.py"], "unrecognized arguments: --dev"),
        (["--devices", "gpu:9999", __file__], "gpu:9999' does not exist"),
        (["--devices", "", __file__], "compute_devices is empty"),
        (["--devices", "auto,cpu:0", __file__], "'auto' is not a device"),
        (["--parameter-device", "nonsense", __file__], "'nonsense' is not a device"),
        (["--start-timeout", "0", __file__], "more than 0 and less than 1e6 seconds"),
        (["--serve", "0"], "from 1 to 1024, not 0"),
        (["--serve", "2", __file__], "--serve takes no script"),
        (["--join", "--health"], "--join takes no script, and only one of"),
        (["--join", "--run-dir", "/tmp", "--devices", "cpu:0,cpu:1"], "--join runs one worker"),
        (["--memory", "disk", __file__], "invalid choice: 'disk'"),
        (["--start-timeout", "inf", __file__], "less than 1e6"),
        (["--max-restarts", "-1", __file__], "max_restarts must be an int from 0"),
        (["--step-timeout", "0", __file__], "step_timeout must be None or a number of seconds"),
        (["--server-recovery", "maybe", __file__], "invalid choice"),
        (["--check-numerics", "yes", __file__], "invalid choice"),
        (["--check-numerics", "raise", "--serve", "2"], "--serve runs none; set CS_CHECK_NUMERICS where the script"),
        (["--log-dir", __file__, __file__], "log files cannot be written"),
        (["--run-dir", "/tmp/" + "x" * 100, __file__], "at most 107 bytes"),
        (["-m"], "name of a module"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("cs-launch: error: ")
    assert words in err
    assert out == ""


def test_a_run_directory_in_use_is_3(capsys: pytest.CaptureFixture[str], short_path: Path) -> None:
    holder = RunDirectory(str(short_path / "r"))
    assert cli.main(["--run-dir", holder.path, __file__]) == 3
    assert f"held by another run (supervisor pid {os.getpid()})" in capsys.readouterr().err
    holder.remove()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for words in (
        "Your script runs ONCE",
        "cs-launch --devices cpu:0,cpu:1 train.py",
        "exit codes",
        "CS_LOG=debug",
        "gpu:all",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_module_is_run_with_its_arguments(standins: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    arguments = (*AS_MODULE, "--devices", "cpu:0", "-m", "train", "--devices", "x", "-m")
    result = processes.run(*arguments, environment=standins(), directory=tmp_path)
    assert (result.code, result.lines) == (0, ["__main__ ['--devices', 'x', '-m']"]), result
