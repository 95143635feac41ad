"""The word `auto` among the settings of a command: models are chosen by the hosts' memory."""

from __future__ import annotations

from pipespec.console.terminal import show

AUTO = "auto"
HELP = (
    "With auto among the settings, target, quantisation and draft are chosen from the models in "
    "the caches by the memory of the hosts."
)


def with_models(settings: list[str], command: str) -> list[str]:
    """The settings, with the models that were chosen in the place of `auto`; the reasons and the
    command that does the same go to standard error. Raises ConfigError, HostFailed."""
    if AUTO not in settings:
        return settings

    from pipespec.instruments.model_choice.choose_for_hosts import choose_settings, explicit_command

    found = choose_settings([text for text in settings if text != AUTO], command)
    show(
        *found.reasons, f"Without {AUTO}: {explicit_command(command, found.settings)}", stderr=True
    )
    return list(found.settings)
