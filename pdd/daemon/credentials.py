"""What the files of the credential settings held when they were last read: at the start, then at each reload.

    Credentials.read(config)  ->  again(config)  ->  changed(new)

The content is in no message, document or repr. Which file is meant is a setting, which waits for a restart; its content does
not.
"""

from __future__ import annotations

import dataclasses

from pdd.config import Config
from pdd.config_credentials import read_credential

API_KEYS, PEER_TOKEN = "api.api_keys_credential", "peers.token_credential"


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    api_keys: tuple[str, ...] = dataclasses.field(repr=False)  # none: no key is asked for
    peer_token: bytes | None = dataclasses.field(repr=False)

    @classmethod
    def read(cls, config: Config) -> Credentials:
        """Raises ConfigProblems: a file cannot be read, or is empty."""
        keys = read_credential(config.api.api_keys_credential, API_KEYS)
        token = read_credential(config.peers.token_credential, PEER_TOKEN)
        return cls(tuple(key.get_secret_value() for key in keys), token[0].get_secret_value().encode() if token else None)

    def again(self, running: Config, wanted: Config) -> Credentials:
        """The same files again. One that `wanted` does not name any more keeps what it had until the restart that this takes.

        Raises ConfigProblems, as `read`.
        """
        keeps_keys = running.api.api_keys_credential != wanted.api.api_keys_credential
        keeps_token = running.peers.token_credential != wanted.peers.token_credential
        fresh = Credentials.read(running.model_copy(update={
            "api": running.api.model_copy(update={"api_keys_credential": ""}) if keeps_keys else running.api,
            "peers": running.peers.model_copy(update={"token_credential": ""}) if keeps_token else running.peers,
        }))
        return Credentials(
            self.api_keys if keeps_keys else fresh.api_keys, self.peer_token if keeps_token else fresh.peer_token
        )

    def changed(self, new: Credentials) -> tuple[str, ...]:
        """The settings whose files hold something else in `new`."""
        differ = ((API_KEYS, self.api_keys != new.api_keys), (PEER_TOKEN, self.peer_token != new.peer_token))
        return tuple(key for key, is_new in differ if is_new)
