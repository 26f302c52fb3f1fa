"""Exports an optimized model, or a part of it, as verified ONNX or as a bundle."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ampopt.bundle.destinations import check_bundle, check_onnx
from ampopt.deploy.bundle_save import save_bundle
from ampopt.deploy.inference_module import InferenceModule
from ampopt.deploy.onnx_dynamic import Dynamic
from ampopt.deploy.onnx_export import OnnxReport, export_onnx
from ampopt.deploy.optimized import Optimized
from ampopt.deploy.sized_program import SizedProgram
from ampopt.errors import InputError
from ampopt.ir.program import Program
from ampopt.measure.ledger import Ledger
from ampopt.system.process_state import process_kept
from ampopt.system.wording import argument


class Deployable(InferenceModule):
    """An optimized model that can be exported to ONNX and saved as a bundle: as a whole, or a part of it."""

    report: Ledger

    def _deployed(self, part: str | None, what: str) -> DeployableGraph:
        """The graph that `what`, a kind of file in words, is to hold. Raises InputError if there is none."""
        raise NotImplementedError

    @process_kept()
    def export_onnx(
        self,
        path: str | os.PathLike[str],
        *,
        part: str | None = None,
        precision: str | None = None,
        io: str | None = None,
        target: str = "onnxruntime",
        dynamic: Dynamic = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        force: bool = False,
    ) -> OnnxReport:
        """Write this model with its portable rewrites as ONNX; the file appears only after verification.

        `dynamic` None: the ranges of the module's program for several sizes, static shapes where it has none;
        {}: static shapes. `precision`: "fp32" or "fp16"; None: that of the chosen lane, and "fp32" for
        bfloat16, in which ONNX Runtime does not compute. `io`: "fp32" or "fp16", the dtype of floating-point
        inputs and outputs; None: that of this module, and "fp32" for bfloat16. `part`: see `save`. The other
        arguments and the errors are those of `ampopt.deploy.onnx_export.export_onnx`; InputError is also
        raised for a suffix of another format, such as model.engine. The user's metric and tolerance also
        apply to the file.
        """
        own = self._deployed(part, "an ONNX file")._optimized
        check_onnx(path)
        return export_onnx(
            own.original,
            own.captured,
            own.recipe.passes,
            path,
            precision=precision or own.recipe.lane.onnx,
            io=io,
            target=target,
            dynamic=dynamic,
            input_names=input_names,
            output_names=output_names,
            tolerance=own.recipe.tolerance,
            metric=own.recipe.metric,
            force=force,
            sizes=own.sizes,
        )

    @process_kept()
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        part: str | None = None,
        onnx: str | None = "auto",
        cpp: bool = False,
        sign_key: str | os.PathLike[str] | None = None,
        as_folder: bool = False,
        tune_s: float = 10.0,
    ) -> None:
        """Save a bundle for a robot: a zip file, or a folder with `as_folder`.

        It contains the model with the recipe of its passes, its ONNX export, which keeps NaN in ONNX Runtime,
        with the session options that a sweep of `tune_s` seconds found fastest here, a self-test, the report,
        and hashes of all files. On a machine that is not busy, and with `tune_s` of 2 or more, it tells which
        backend is best here, too. A module with one program for a range of sizes is saved with that program,
        and a self-test at corners of the range, too. A state that the model keeps is stored as it was when
        the model was optimized. Neither of the two tells the best backend.
        `part`: of a model that is not one graph, the optimized submodule of this name, as
        `report.regions` lists it: the file is a model of its own, with the inputs that the submodule got in
        the example call, and without hooks and the code around it. `onnx`: "fp32", "fp16", "auto" (as
        `export_onnx`), or None for none. `cpp` adds the program as TorchScript for C++, of the example's
        sizes. `sign_key`: a private Ed25519 key in PEM. An existing bundle at `path` is replaced atomically.
        Raises ExportError for a model that a bundle cannot hold, BundleError if it cannot be written,
        InputError for a suffix of another format, such as robot.engine, and the errors of
        `export_onnx`. Name, folder, packages and key are checked first.
        """
        own = self._deployed(part, "a bundle")
        check_bundle(path, onnx=onnx is not None, sign_key=sign_key)
        save_bundle(
            own,
            own._optimized,
            own._sized,
            path,
            onnx=onnx,
            cpp=cpp,
            sign_key=sign_key,
            as_folder=as_folder,
            tune_s=tune_s,
        )


class DeployableGraph(Deployable):
    """A captured and optimized model: one graph, which a file holds as a whole."""

    program: Program
    _optimized: Optimized
    _sized: SizedProgram | None

    def _deployed(self, part: str | None, what: str) -> DeployableGraph:
        if part is not None:
            raise InputError(
                f"the model is one graph, and {what} holds all of it: leave {argument('part', part)} out"
            )
        return self
