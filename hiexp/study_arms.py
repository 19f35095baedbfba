"""The arms of the lab study, as data: what each trains with, what it is compared with, and what it may be tuned on.

An arm is a name and the settings in which it differs from configs/lab.yaml; a new one is a line of ARMS. Everything
else (world, questions, warm start, seeds, numbers of steps) is the same for all and is decided in study_plan.py.
"""

from dataclasses import dataclass

from hiexp.config import ConfigError, lookup

CASES = ("rollout.strategy_level=0", "rollout.use_cases=true")
E2 = ("rollout.strategy_level=2", "rollout.use_cases=false")
E3 = ("rollout.strategy_level=3", "rollout.use_cases=false")
E2_E1 = ("rollout.strategy_level=2", "rollout.use_cases=true")
E3_E1 = ("rollout.strategy_level=3", "rollout.use_cases=true")
LOOSE = "hek.strategy_threshold=0.5"
"""the lab's is 0.8: a pattern is shown where its title is near enough"""
GSPO = ("loss.algorithm=gspo",)
CORE, FULL = "core", "full"


@dataclass(frozen=True)
class Arm:
    """One way to train (or to leave a policy untrained), the same in every world."""

    says: str
    """what it is, for the report"""
    overrides: tuple[str, ...] = ()
    """key=value settings on top of the study's"""
    store: str = ""
    """name in study_stores.STORES of the experience it trains with and is tested with; empty = none in training"""
    tuned_as: str = ""
    """the arm whose learning rate and clip range it takes; a control takes those of what it controls; empty = no RL"""
    rft: bool = False
    """begins with rejection-sampled fine-tuning on the attempts behind the store `self` (the config's section sft)"""
    steps: float = 1.0
    """training steps in those of the study; 0 = no RL: the policy that it starts from is tested"""
    prompts: float = 1.0
    """questions per step in those of the study"""
    tests: tuple[str, ...] = ("on", "off")
    """with experience, without, or both"""
    set: str = CORE
    """core, or full: only when everything is asked for"""

    @property
    def test_store(self) -> str:
        """What `on` means for it: its own store; for an arm without one, the policy's own experience."""
        return self.store or "self"

    @property
    def recipe(self) -> list[str]:
        """What a job is told of it, so that an arm that has been edited is run again."""
        varied = (f"{key}={getattr(self, key)}" for key in ("store", "tuned_as", "rft", "steps", "prompts"))
        return [*self.overrides, *varied, f"tests={','.join(self.tests)}"]


def _free(says: str, overrides: tuple[str, ...], store: str = "self", set: str = CORE) -> Arm:
    return Arm(says, overrides, store, steps=0, tests=("on",), set=set)


UNTRAINED = {
    "base": Arm("the warm-started policy, without experience", steps=0, tests=("off",)),
    "free_e1": _free("untrained, cases beside the documents", CASES),
    "free_e2": _free("untrained, patterns in the prompt", E2),
    "free_e3": _free("untrained, strategies in the prompt", E3),
    "free_e2_e1": _free("untrained, patterns and cases", E2_E1),
    "free_e3_e1": _free("untrained, strategies and cases", E3_E1),
    "free_teacher": _free("untrained, patterns and cases by a teacher", E2_E1, "teacher"),
    "free_shuffled": _free("untrained, control: the lessons of other questions", E2_E1, "shuffled"),
    "free_filler": _free("untrained, control: as many words that say nothing", E2_E1, "filler"),
    "free_oracle": _free("untrained, upper bound: the right plan of every kind of question", E2_E1, "oracle"),
    "free_mismatched": _free("untrained, control: titles kept, advice of other lessons", E2_E1, "mismatched", FULL),
    "free_coarse": _free("untrained, patterns of wider clusters", E2, "coarse", FULL),
    "free_loose": _free("untrained, patterns from farther away", (*E2, LOOSE), set=FULL),
    "free_advice": _free("untrained, patterns that do not say when they apply", E2, "advice", FULL),
    "free_titles": _free("untrained, patterns that say when they apply and nothing else", E2, "titles", FULL),
}
TRAINED = {
    "grpo": Arm("GRPO, no experience", tuned_as="grpo"),
    "e2_e1": Arm("GRPO with patterns and cases in every group", E2_E1, "self", "e2_e1"),
    "e2": Arm("GRPO with patterns", E2, "self", "e2"),
    "e3_e1": Arm("GRPO with strategies and cases", E3_E1, "self", "e3_e1"),
    "e3": Arm("GRPO with strategies", E3, "self", "e3"),
    "gspo": Arm("GSPO, no experience", GSPO, tuned_as="gspo"),
    "gspo_e2_e1": Arm("GSPO with patterns and cases", (*GSPO, *E2_E1), "self", "gspo_e2_e1"),
    "half": Arm("as e2_e1, half of the groups without experience", (*E2_E1, "dosage.dropout=0.5"), "self", "half"),
    "grpo_half": Arm("control: GRPO with half of the groups", (), "", "grpo", prompts=0.5, tests=("off",)),
    "grpo_cpu": Arm("control: GRPO for the CPU time of e2_e1", (), "", "grpo", steps=1.7, tests=("off",)),
    "grpo_same": Arm("control: GRPO at the learning rate and clip of e2_e1", (), "", "e2_e1", tests=("off",)),
    "by_teacher": Arm("as e2_e1, lessons by a teacher", E2_E1, "teacher", "e2_e1"),
    "shuffled": Arm("control: as e2_e1, the lessons of other questions", E2_E1, "shuffled", "e2_e1"),
    "filler": Arm("control: as e2_e1, as many words that say nothing", E2_E1, "filler", "e2_e1"),
    "oracle": Arm("upper bound: as e2_e1, the right plan of every kind", E2_E1, "oracle", "e2_e1", set=FULL),
    "mismatched": Arm("control: titles kept, advice of other lessons", E2_E1, "mismatched", "e2_e1", set=FULL),
    "leak": Arm(
        "control: a question sees what was distilled from itself",
        (*E2_E1, "hek.exclude_self=false"),
        "self",
        "e2_e1",
        set=FULL,
    ),
    "eighth": Arm("an eighth of the groups without", (*E2_E1, "dosage.dropout=0.125"), "self", "half", set=FULL),
    "anneal": Arm(
        "from experience in every group to none",
        (*E2_E1, "dosage.dropout=0.0", "dosage.dropout_end=1.0"),
        "self",
        "half",
        set=FULL,
    ),
    "closed": Arm("an eighth without, the HEK refreshed", (*E2_E1, "refresh.every=10"), "self", "half", set=FULL),
    "gspo_half": Arm(
        "GSPO, half of the groups without", (*GSPO, *E2_E1, "dosage.dropout=0.5"), "self", "gspo_e2_e1", set=FULL
    ),
    "half_uplift": Arm(
        "half of the groups without, shown only to questions that gained from it",
        (*E2_E1, "dosage.dropout=0.5", "hek.min_uplift=0"),
        "measured",
        "half",
        set=FULL,
    ),
    "half_e3_e1": Arm(
        "strategies and cases, half of the groups without",
        (*E3_E1, "dosage.dropout=0.5"),
        "self",
        "half",
        set=FULL,
    ),
    "half_e2": Arm("patterns, half of the groups without", (*E2, "dosage.dropout=0.5"), "self", "half", set=FULL),
    "e2_coarse": Arm("as e2, wider clusters", E2, "coarse", "e2", set=FULL),
    "e2_loose": Arm("as e2, patterns from farther away", (*E2, LOOSE), "self", "e2", set=FULL),
    "e2_advice": Arm("as e2, patterns that do not say when they apply", E2, "advice", "e2", set=FULL),
    "rft": Arm("RFT on the attempts of the HEK's build, no RL", E2, rft=True, steps=0, set=FULL),
    "rft_grpo": Arm("RFT, then GRPO without experience, tuned by itself", E2, "", "rft_grpo", rft=True, set=FULL),
    "rft_same": Arm("RFT, then GRPO without experience, at the values of rft_e2", E2, "", "rft_e2", rft=True, set=FULL),
    "rft_e2": Arm("RFT, then GRPO with patterns", E2, "self", "rft_e2", rft=True, set=FULL),
    "grpo_long": Arm(
        "control: GRPO for the CPU time of rft_e2, its HEK and its RFT", (), "", "grpo", steps=2.0, set=FULL
    ),
}
ARMS = UNTRAINED | TRAINED
TUNED = tuple(dict.fromkeys(arm.tuned_as for arm in TRAINED.values() if arm.tuned_as))
"""arms that get a learning rate and a clip range of their own"""


def chosen_arms(names: tuple[str, ...], which: str) -> dict[str, Arm]:
    """The arms of a set, or those named, in the order of ARMS."""
    lookup(dict.fromkeys((CORE, FULL)), which, "set")
    for name in names:
        lookup(ARMS, name, "arm")
    wanted = names or tuple(name for name, arm in ARMS.items() if which == FULL or arm.set == CORE)
    return {name: arm for name, arm in ARMS.items() if name in wanted}


def clip_settings(clip: str) -> tuple[str, ...]:
    """Settings of a point of the clip grid: "own" leaves the algorithm its range, a number is both bounds."""
    if clip == "own":
        return ()
    try:
        value = float(clip)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"clip {clip!r} is neither own nor a number in (0, 1]")
    return (f"loss.clip_low={value}", f"loss.clip_high={value}")
