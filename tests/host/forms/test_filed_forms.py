# SPDX-License-Identifier: Apache-2.0
"""Forms that lie packed on a drive open as they would from memory, bit for bit."""

import pytest
import torch
from stored_document import stored_document

from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import ColdPoolError, SettingsError
from hillinfer.forms.filed import DriveForm, FormFile
from hillinfer.forms.table import make_form
from hillinfer.forms.whole import StoredRowsForm
from hillinfer.model_shape import ModelShape
from hillinfer.store.store import Store


@pytest.fixture
def document(tmp_path):
    Store.create(tmp_path / "store", 64 << 20)
    with Store(tmp_path / "store") as store:
        yield stored_document(store, "llama", torch.bfloat16)


@pytest.fixture
def file(tmp_path):
    file = FormFile(tmp_path)
    yield file
    file.close()


def same(opened, other):
    return all(
        torch.equal(one.keys, two.keys) and torch.equal(one.values, two.values)
        for one, two in zip(opened.cache.layers, other.cache.layers, strict=True)
    )


@pytest.mark.parametrize("name", ["held", "int8", "mixed4", "int2", "knorm-0.5"])
def test_it_opens_as_from_memory(document, file, name):
    form = make_form(name)
    expected = form.make(document.model, document.states).open()
    filed = DriveForm(form, file)
    made = filed.make(document.model, document.states)
    other = DriveForm(make_form("held"), file).make(document.model, document.states)
    shape = ModelShape.from_config(document.model.config, document.model.dtype)
    assert filed.name == f"drive-{name}"
    assert DriveForm(form, file, 2).name == f"drive2-{name}"
    assert made.byte_count == filed.byte_count(shape, 256) == form.byte_count(shape, 256)
    assert (filed.lies_on_drive, form.lies_on_drive) == (True, False)
    for _ in range(2):
        opened = made.open()
        assert opened.cache.get_seq_length() == 256
        assert same(opened, expected)
        # The twin: what is changed in what was opened is seen, and changes nothing on the drive.
        opened.cache.layers[0].keys[0, 0, 0, 0] += 1
        assert not same(opened, expected)
    made.close()
    made.close()
    other.close()


def test_places_are_used_again_and_nothing_has_a_name(file, tmp_path):
    numbers = [torch.arange(5000, dtype=torch.int32), torch.tensor([1.5, -2.0])]
    before = sorted(tmp_path.iterdir())
    first, second, third = (file.write(numbers) for _ in range(3))
    assert sorted(tmp_path.iterdir()) == before
    assert [one.offset for one in (first, second, third)] == [0, 20480, 40960]
    file.give(second)
    file.give(first)
    # Two places beside each other are one, of which what is left stays free.
    wide = file.write([torch.arange(7000, dtype=torch.int32)])
    assert (wide.offset, wide.byte_count) == (0, 28672)
    assert file.write([torch.zeros(1024)]).offset == 28672
    assert file.write(numbers).offset == 61440
    for extent in (third, wide):
        assert all(map(torch.equal, file.read(extent), numbers)) is (extent is third)


class OtherBytes(DriveCalls):
    """A drive that gives back one bit that was not written."""

    wrong = None

    def preadv(self, descriptor, into, offset):
        count = super().preadv(descriptor, into, offset)
        if self.wrong is not None and offset <= self.wrong < offset + count:
            into[self.wrong - offset] ^= 0x40
        return count


@pytest.mark.parametrize("wrong", [0, 100, (256 << 10) - 1, 256 << 10, 300_000])
def test_other_bytes_than_were_written_are_noticed(tmp_path, wrong):
    numbers, calls = [torch.arange(25_000), torch.arange(20_000)], OtherBytes()
    file = FormFile(tmp_path, calls)
    other = file.write(numbers[1:])
    extent = file.write(numbers)
    calls.wrong = extent.offset + wrong
    with pytest.raises(ColdPoolError, match="are not what was written there"):
        file.read(extent)
    # The twin: what lies elsewhere is read, and so is this once the drive gives it back.
    assert torch.equal(*file.read(other), numbers[1])
    calls.wrong = None
    assert all(map(torch.equal, file.read(extent), numbers))
    file.close()


def test_what_has_no_memory_is_refused(document, file):
    for form in (make_form("text"), StoredRowsForm(document.prompts)):
        with pytest.raises(SettingsError, match=f"form='{form.name}' has no memory"):
            DriveForm(form, file)
