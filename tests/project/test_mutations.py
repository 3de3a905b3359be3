"""The faults of tests/mutants, without making one: that takes minutes each."""

from mutations import MUTANTS, OF_OPERATIONS, OF_VLLM, misplaced, of_tests


def test_every_fault_has_its_place():
    assert misplaced() == []


def test_a_fault_without_its_place_is_found():
    """A renamed file, a line that is gone, and one that is there twice."""
    mutant = MUTANTS[0]
    wrong = (
        mutant._replace(file="cpu/gone.c"),
        mutant._replace(old="no such line"),
        mutant._replace(old="\n"),
    )
    assert misplaced((mutant, *wrong)) == [line for one in wrong for line in misplaced((one,))]
    assert len(misplaced(wrong)) == 3


def test_every_fault_changes_the_text_and_has_a_name_of_its_own():
    assert [mutant.fault for mutant in MUTANTS if mutant.old == mutant.new] == []
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)


def test_every_file_of_tests_exists():
    named = {mutant.fault.partition(":")[0] for mutant in MUTANTS if not mutant.backend and mutant.fault[0].isupper()}
    assert named >= {*OF_OPERATIONS, *OF_VLLM}
    assert [name for name in named if not of_tests(name)] == []


def test_a_fault_with_a_file_of_tests_is_shown_to_it():
    """With a backend's name it would be shown to the kit alone."""
    assert [m.fault for m in MUTANTS if m.backend == "cpu" and of_tests(m.fault.partition(":")[0])] == []
