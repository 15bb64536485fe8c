"""Launch on machines reached by ssh: a hosts file names them, the first is the Ray head and runs the recipe.

A line of the hosts file is `HOST [address=IP]`; HOST is what ssh takes (user@name, or a name of ~/.ssh/config), the
address is what the other machines reach it by. Lines that begin with # are comments.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tidemill.errors import ConfigError
from tidemill.launch import place, script
from tidemill.launch.job import Job, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, LaunchError, Step, Token
from tidemill.launch.targets import detached

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")


class SshOptions(Options):
    nodes: int = Field(0, ge=0, description="machines of the hosts file to use; 0: all")
    hosts: str = Field("hosts", description="the file that lists the machines")
    folder: str = Field(".tidemill/launch", description="of jobs there, under the home folder if relative")


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    address: str


class Ssh:
    about: ClassVar[str] = "machines of a hosts file: Ray head and workers started over ssh"
    options: ClassVar[type[Options]] = SshOptions
    shares_files: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = ("ssh",)

    def run_folder(self, options: Options, folder: str) -> str:
        return folder if folder.startswith("/") else "../runs"  # beside the unpacked code, in the job's folder

    def steps(self, job: Job) -> list[Step]:
        options = parse(SshOptions, job.options, job.where)
        hosts = _hosts(job)
        folder = _folder(job)
        found: list[Step] = [Token(job.folder / "token")]
        for host in hosts:
            found.append(_on(host, f"{claim(folder)} && tar -xzf - -C {folder}/code", job.archive))
            found.append(_on(host, f"umask 077 && cat > {folder}/token", job.folder / "token"))
        for rank, host in enumerate(hosts):
            found.append(_on(host, f"cat > {folder}/job.sh", script.script(options, _variables(options, hosts, rank))))
        return [*found, *(_on(host, detached.start(folder)) for host in hosts)]

    def reference(self, job: Job, output: str) -> str:
        return ",".join(host.name for host in _hosts(job))

    def status(self, job: Job) -> Status:
        """Node 0's: it runs the recipe, and the others end with it."""
        return detached.read_status(_on(_hosts(job)[0], detached.status(_folder(job))).perform())

    def logs(self, job: Job, lines: int) -> str:
        return _on(_hosts(job)[0], detached.logs(_folder(job), lines)).perform()

    def stop(self, job: Job) -> None:
        """Node 0 saves and ends; the others leave when the head is gone."""
        with contextlib.suppress(LaunchError):
            _on(_hosts(job)[0], detached.stop(_folder(job))).perform()


def claim(folder: str) -> str:
    """The shell's words that make a job's folder. One that another user has made is refused: it could be changed."""
    refusal = f'{{ echo "{folder} belongs to another user: name another -o folder" >&2; exit 73; }}'
    return f"mkdir -p {folder}/code && {{ [ -O {folder} ] && [ -O {folder}/code ] || {refusal}; }}"


def read_hosts(file: Path) -> list[Host]:
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"the file of hosts, {file}: {error.strerror}", "-o hosts=FILE, with one machine per line"
        ) from error
    hosts = [_host(line.split("#")[0].split(), f"{file}:{n}") for n, line in enumerate(lines, 1) if _is_host(line)]
    if not hosts:
        raise ConfigError(f"hosts file {file} names no machine", "one a line: HOST [address=IP]")
    if len({host.name for host in hosts}) < len(hosts):
        raise ConfigError(f"hosts file {file} names a machine twice", "one node a machine")
    return hosts


def _is_host(line: str) -> bool:
    return bool(line.split("#")[0].strip())


def _host(words: list[str], where: str) -> Host:
    name, rest = words[0], words[1:]
    if any(not word.startswith("address=") for word in rest) or len(rest) > 1 or name.startswith("-"):
        raise ConfigError(f"{where}: {' '.join(words)!r} is no host", "write HOST [address=IP]")
    return Host(name, rest[0].removeprefix("address=") if rest else name.split("@")[-1])


def _variables(options: SshOptions, hosts: list[Host], rank: int) -> dict[str, str]:
    told = {place.RANK: str(rank), place.NODES: str(len(hosts))}
    told[place.TOKEN_PATH] = "../token"  # beside the unpacked code
    return told | {place.HEAD: hosts[0].address, place.HEAD_PORT: str(options.port)}


def _hosts(job: Job) -> list[Host]:
    return chosen(parse(SshOptions, job.options, job.where))


def chosen(options: SshOptions) -> list[Host]:
    hosts = read_hosts(Path(options.hosts))
    if options.nodes > len(hosts):
        raise ConfigError(f"-o nodes={options.nodes}, but {options.hosts} names {len(hosts)} machines")
    return hosts[: options.nodes or None]


def _folder(job: Job) -> str:
    return f"{parse(SshOptions, job.options, job.where).folder.rstrip('/')}/{job.label}"


def _on(host: Host, text: str, stdin: Path | str | None = None) -> Command:
    return Command((*SSH, host.name, text), stdin)
