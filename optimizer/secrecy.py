"""What is a secret, by its name and by its looks; and the refusal of one as a value, before anything is stored or started.

One rule for both ends: what ``refuse_secret`` lets pass is what ``clean_text`` leaves as it is, so that a stored command is
never shown, exported or resumed with a placeholder in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vopt.optimizer.errors import UsageError

REMOVED = "[removed]"
ENVIRONMENT_PREFIX = "env:"
SHORTEST_SECRET = 6
"""Characters; a shorter environment value would take ordinary words out of every page."""

SECRET_ARGUMENTS = {
    "api_key": "leave the flag out and set VLLM_API_KEY in the environment of the server",
    "hf_token": "leave the value out and set HF_TOKEN in the environment (or log in with `hf auth login`)",
}
_INSTEAD = {
    "otlp_traces_endpoint": "the URL without user, password and key; its exporter reads OTEL_EXPORTER_OTLP_TRACES_HEADERS "
    "('authorization=…') at launch: export that in the shell that starts vopt",
    "kv_transfer_config": "leave it out of the value; a connector reads it at launch from a variable (LMCACHE_REMOTE_URL) or "
    "from a file (LMCACHE_CONFIG_FILE): export that in the shell that starts vopt",
    "model_loader_extra_config": "leave it out of the value; the loaders read AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY at "
    "launch: export them in the shell that starts vopt",
}
_ANYWHERE = (
    "leave it out of the value; give it by a file, or by a variable that is exported in the shell that starts vopt: "
    "engines inherit it"
)

_STRONG = re.compile(
    r"(?:^|_)(?:token|passwords?|passwd|passphrase|secrets?|api_?keys?|authorization|bearer|jwt|pat"
    r"|(?:access|private|secret|account|auth|encryption|signing|master)_?keys?)$"
)
_WEAK = re.compile(r"(?:^|_)(?:pass|pw|auth|cookies?|credentials?|creds?|sas)$|[^_]_(?:pwd|key)$")
_INNOCENT_NAME = re.compile(
    r"^(?:allow|enable|disable|no|require)_"
    r"|(?:^|_)(?:eos|bos|pad|unk|mask|sep|cls|image|video|audio|stop|start|end|begin|special|think|thinking|reasoning|tool"
    r"|placeholder|prefix|suffix|middle|per|decoder_start|first|last|next|new)_token$"
    r"|(?:^|_)(?:cache|sort|primary|partition|hash|compile|compilation|routing|public|group|layer|lookup|index|weight)_key$"
)
_MEANS_NOTHING = frozenset({"", "none", "null", "true", "false", "yes", "no", "on", "off", "auto", "0", "1"})
_AUTH_MODES = re.compile(
    "basic|digest|bearer|oauth2?|oidc|kerberos|gssapi|iam|m?tls|ssl|sasl|token|password|trust|md5|ldap|saml"
)
_PATH = re.compile(r"(?:~|\.{1,2})?/[^\s@]*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[kKmMgG]|[eE][+-]?\d+)?")
_SPECIAL_TOKEN = re.compile(r"<.*>|\[[A-Z_0-9]+\]", re.DOTALL)

_SHAPES: Mapping[str, str] = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{16,}|\bAIza[A-Za-z0-9_-]{35}",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "an AWS access key": r"\bA[KS]IA[A-Z0-9]{16}\b",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}|(?<=hooks\.slack\.com/services/)[A-Za-z0-9/]{16,}",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{10,2048}\.[A-Za-z0-9_-]{10,4096}\.[A-Za-z0-9_-]*",
    "a bearer token": r"(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{8,}|(?<=[Bb]earer%20)[A-Za-z0-9._~+/=-]{8,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    "a URL with a password": r"(?<=://)[^/\s:@?#'\"]*:[^/\s?#'\"]+(?=@)|(?<=://)[^/\s:@?#'\"]{20,}(?=@)",
}
_MARKS = ("hf_", ("sk-", "AIza"), ("gh", "github_pat_"), "glpat-", "IA", ("xox", "slack"), "eyJ", "earer", "PRIVATE KEY", "://")
"""Of each shape a text without which it cannot be there: looking for that first is ten times as fast on an engine's log."""
_LOOKS = tuple(
    (re.compile(pattern), (marks,) if isinstance(marks, str) else marks)
    for pattern, marks in zip(_SHAPES.values(), _MARKS, strict=True)
)
_ASSIGNED = re.compile(
    r"(?i)(?:(?P<name>token|secret|password|passwd|passphrase|(?:api|access|account|private|secret|signing)[_-]?key)"
    r"['\"]?\s{0,8}[=:]\s{0,8}['\"]?"
    r"|(?<=[?&])(?P<query>key|sig|signature|auth|pass|pwd|x-(?:amz|goog)-(?:signature|credential|security-token))="
    r"|\bauthorization['\"]?\s{0,8}[=:]\s{0,8}['\"]?(?:(?:basic|bearer|token|digest)(?:\s{1,8}|%20))?)"
    r"(?P<value>[^\s'\",)}&]{6,})"
)
_BEFORE = re.compile(r"[A-Za-z0-9_-]*\Z")
_LONGEST_NAME = 64


def is_secret_name(name: str) -> bool:
    """Whether a variable, an option or a JSON key of this name holds a secret, as far as a name can tell."""
    plain = _plain(name)
    return bool(_STRONG.search(plain) or _WEAK.search(plain)) and _INNOCENT_NAME.search(plain) is None


def holds_secret(name: str, value: object) -> bool:
    """Whether ``value`` is a secret because of the name that it has: ``HF_TOKEN`` with a text, and not ``SOME_AUTH=1``,
    ``SSL_KEY=/k.pem``, ``max_token: 512`` or ``pad_token: <pad>``."""
    if value is None or isinstance(value, (bool, Mapping, list, tuple)) or not is_secret_name(name):
        return False
    plain, text = _plain(name), str(value).strip()
    if text.lower() in _MEANS_NOTHING:
        return False
    if _STRONG.search(plain):
        counted = plain.endswith("token") and _NUMBER.fullmatch(text)
        return not (counted or (plain.endswith("token") and _SPECIAL_TOKEN.fullmatch(text)))
    if _PATH.fullmatch(text) or (plain.endswith("auth") and _AUTH_MODES.fullmatch(text.lower())):
        return False
    return not (plain.endswith("key") and (_NUMBER.fullmatch(text) or len(text) < SHORTEST_SECRET))


def _plain(name: str) -> str:
    """``--api-key``, ``apiKey``, ``env:API_KEY`` and ``a.api_key`` as words with underscores, in lower case."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix(ENVIRONMENT_PREFIX).lstrip("-"))
    return re.sub(r"[-.:\s]+", "_", parted).lower()


def known_secrets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of an environment (``os.environ``) that must appear nowhere, longest first."""
    found = {value for name, value in environment.items() if len(value) >= SHORTEST_SECRET and holds_secret(name, value)}
    return tuple(sorted(found, key=len, reverse=True))


def url_passwords(text: str) -> tuple[str, ...]:
    """The passwords in the URLs of a text, each with its user and alone."""
    found = re.findall(_SHAPES["a URL with a password"], text)
    return tuple(part for one in found for part in (one, one.partition(":")[2]) if part)


def clean_text(text: str, secrets: Iterable[str] = (), mark: str = REMOVED) -> str:
    """``text`` without known secrets and without what looks like a token; ``mark`` stands in their places."""
    for secret in secrets:
        text = text.replace(secret, mark)
    for pattern, marks in _LOOKS:
        if any(one in text for one in marks):
            text = pattern.sub(mark, text)
    return _ASSIGNED.sub(
        lambda match: match[0] if _harmless(match) else match[0][: match.start("value") - match.start()] + mark, text
    )


def _harmless(match: re.Match[str]) -> bool:
    """Whether what is assigned there is no secret after all: a number of tokens, a special token, a reference."""
    value = match["value"]
    if value.startswith(("None", "$", "<", "[struck")) or REMOVED in value:
        return True
    name = _name_of(match)
    return name is not None and (
        not is_secret_name(name) or (name.lower().endswith("token") and bool(_NUMBER.fullmatch(value)))
    )


def _name_of(match: re.Match[str]) -> str | None:
    """The whole name that something is assigned to; ``None``: a part of a URL, or a header, which are known by themselves."""
    if match["name"] is None:
        return None
    before = _BEFORE.search(match.string, max(0, match.start() - _LONGEST_NAME), match.start())
    return (before[0] if before else "") + match["name"]


def refuse_secret(name: str, value: object) -> None:
    """``UsageError`` when ``name`` (an argument or ``env:NAME``) holds a secret as a value. Never repeats the value."""
    plain = name.lstrip("-").replace("-", "_")
    variable = name.removeprefix(ENVIRONMENT_PREFIX) if name.startswith(ENVIRONMENT_PREFIX) else None
    what = f"the environment variable {variable}" if variable is not None else plain
    if any(REMOVED in text for text in _texts(value)):
        raise _lost(what)
    if plain in SECRET_ARGUMENTS and value not in (None, True, False):
        raise UsageError(
            f"{plain} as a value would end in logs, studies and scripts: a secret is not taken on the command line",
            hint=SECRET_ARGUMENTS[plain],
        )
    if holds_secret(name, value):
        raise UsageError(
            f"{what} holds a secret, as its name says: as a value it would end in logs, studies and scripts",
            hint=_by_environment(variable) if variable is not None else _instead(plain),
        )
    if (inside := _secret_inside(value, plain)) is not None:
        raise UsageError(
            f"{what} holds {inside!r}, a secret: as a value it would end in logs, studies and scripts",
            hint=_by_environment(variable) if variable is not None else _instead(plain),
        )
    for text in _texts(value):
        if (kind := secret_shape(text)) is not None:
            raise UsageError(
                f"{what} holds {kind}, a secret: as a value it would end in logs, studies and scripts",
                hint=_by_environment(variable) if variable is not None else _instead(plain),
            )


def secret_shape(text: str) -> str | None:
    """What kind of secret stands in ``text`` by its looks; ``None``: nothing that ``clean_text`` would take out."""
    for kind, pattern in _SHAPES.items():
        if re.search(pattern, text):
            return kind
    found = next((match for match in _ASSIGNED.finditer(text) if not _harmless(match)), None)
    if found is None:
        return None
    return f"{_name_of(found) or found['query'] or 'authorization'}=…"


def refuse_words(words: Sequence[str]) -> None:
    """``refuse_secret`` for every word of a launch command, flags that this vLLM lacks included. Raises ``UsageError``."""
    flag = ""
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            flag, separator, value = word.partition("=")
            if separator:
                refuse_secret(flag, value)
        else:
            refuse_secret(flag or "the command", word)


def refuse_known(texts: Iterable[str], environment: Mapping[str, str]) -> None:
    """``UsageError`` when a text holds the value of a secret variable of this shell: written in clear it would be stored, and
    shown as a placeholder. The variable is named, the value is not."""
    for text in texts:
        for name, value in environment.items():
            if len(value) >= SHORTEST_SECRET and value in text and holds_secret(name, value):
                raise UsageError(
                    f"the command holds the value of {name}, a secret of this shell: it would end in logs, studies and scripts",
                    hint=f"leave it out of the command: engines inherit {name}; or `unset {name}` where it is none",
                )


def _lost(what: str) -> UsageError:
    return UsageError(
        f"{what} holds {REMOVED!r}, which stands for a secret that was taken out: this is not the command that was measured",
        hint="vopt search … with the command itself; a secret in it goes into the environment of the shell that starts vopt",
    )


def _by_environment(variable: str) -> str:
    return f"export {variable} in the shell that starts the command; engines inherit it"


def _instead(plain: str) -> str:
    return _INSTEAD.get(plain.partition(".")[0], _ANYWHERE)


def _texts(value: object) -> Iterable[str]:
    """Every text in a JSON value, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield str(key)
                yield from _texts(item)
        case list() | tuple():
            for item in value:
                yield from _texts(item)
        case _:
            return


def _secret_inside(value: Any, name: str) -> str | None:
    """The first key in a JSON value, or in its text, that names a secret and has one."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip()[:1] in ("{", "[") else None
        except ValueError:
            return None
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, str) and holds_secret(str(key), item):
                return str(key)
            if (found := _secret_inside(item, str(key))) is not None:
                return found
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, str) and holds_secret(name, item):
                return name
            if (found := _secret_inside(item, name)) is not None:
                return found
    return None
