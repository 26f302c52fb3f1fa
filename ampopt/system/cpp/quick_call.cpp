// A call of a captured CUDA graph by the shortest way, as an extension module of Python; see quick_call.py,
// which says how many outputs there is room for: MOST_OUTPUTS.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace {

using Word = std::uint64_t;
using Launch = int (*)(void *instance, void *stream);
using Update = int (*)(void *instance, void *node, void *params);
using UpdateIn = int (*)(void *instance, void *node, void *params, void *context);

// What `bind` is given, in order.
enum Part {
    SAME,
    RESTORE,
    ACQUIRE,
    RELEASE,
    GRAPH,
    FORMS,
    FRESH,
    STREAM_NOW,
    DEVICE_NOW,
    INDEX,
    MODE_NOW,
    PARTS
};

PyObject *data_ptr_name, *outputs_name, *inference_name, *table_name, *stream_name, *clone_name;

// A reference that is given back at the end of its scope.
class Owned {
  public:
    explicit Owned(PyObject *object) : object_(object) {}
    ~Owned() { Py_XDECREF(object_); }
    Owned(const Owned &) = delete;
    Owned &operator=(const Owned &) = delete;
    PyObject *get() const { return object_; }
    PyObject *give() {
        PyObject *given = object_;
        object_ = nullptr;
        return given;
    }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject *object_;
};

template <class T> T *pointer(Word word) { return reinterpret_cast<T *>(word); }

// The number that a Python int is; false with an exception set where it is none, or not there.
bool number(PyObject *object, Word *found) {
    if (object == nullptr) return false;
    *found = PyLong_AsUnsignedLongLong(object);
    return *found != static_cast<Word>(-1) || !PyErr_Occurred();
}

bool address_of(PyObject *tensor, Word *found) {
    return number(Owned(PyObject_CallMethodNoArgs(tensor, data_ptr_name)).get(), found);
}

// A table is: how to launch, the instance, the number of uses, and for each of them: the address that the
// parameters say now and the one that the instance uses (places of both), how many places in parameters say
// it, (place, offset) of each, how many nodes have them, (update, node, parameters, context or 0) of each.
bool move(const Word *table, const Word *addresses) {
    const Word uses = table[2];
    const Word *at = table + 3;
    for (Word use = 0; use < uses; ++use) {
        Word *written = pointer<Word>(at[0]);
        const Word places = at[2];
        at += 3;
        for (Word place = 0; place < places; ++place, at += 2)
            if (*written != addresses[use]) *pointer<Word>(at[0]) = addresses[use] + at[1];
        *written = addresses[use];
        at += 1 + 4 * at[0];
    }
    at = table + 3;
    for (Word use = 0; use < uses; ++use) {
        Word *used = pointer<Word>(at[1]);
        const bool stays = *used == addresses[use];
        at += 3 + 2 * at[2];
        const Word nodes = *at++;
        if (!stays) *used = 0;  // until all of it is done
        for (Word node = 0; node < nodes; ++node, at += 4) {
            if (stays) continue;
            void *instance = pointer<void>(table[1]), *it = pointer<void>(at[1]), *params = pointer<void>(at[2]);
            const int status = at[3] ? reinterpret_cast<UpdateIn>(at[0])(instance, it, params, pointer<void>(at[3]))
                                     : reinterpret_cast<Update>(at[0])(instance, it, params);
            if (status != 0) return false;
        }
        if (!stays) *used = addresses[use];
    }
    return true;
}

// The form for inputs at an address, borrowed; null without an exception where there is none.
PyObject *form_at(PyObject *forms, Word address) {
    PyObject *sources, *form;
    for (Py_ssize_t next = 0; PyDict_Next(forms, &next, &sources, &form);)
        if (PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(sources, 0)) == address) return form;
    return nullptr;
}

// Memory for the results of the form's next call, into which it then writes; false where that fails.
bool prepare(PyObject *const *own, PyObject *form, const Word *table, Word source) {
    if (PyObject_SetAttr(form, outputs_name, Py_None) < 0) return false;  // until all of it is done
    const Py_ssize_t count = PyTuple_GET_SIZE(own[FRESH]);
    Word addresses[1 + MOST_OUTPUTS] = {source};
    Owned made(PyTuple_New(count));
    if (!made) return false;
    for (Py_ssize_t index = 0; index < count; ++index) {
        PyObject *fresh = PyObject_CallNoArgs(PyTuple_GET_ITEM(own[FRESH], index));
        if (fresh == nullptr) return false;
        PyTuple_SET_ITEM(made.get(), index, fresh);
        if (!address_of(fresh, &addresses[1 + index])) return false;
    }
    if (!move(table, addresses)) return false;
    Owned mode(PyObject_CallNoArgs(own[MODE_NOW]));
    return mode && PyObject_SetAttr(form, inference_name, mode.get()) == 0 &&
           PyObject_SetAttr(form, outputs_name, made.get()) == 0;
}

// Results that were prepared in another mode than the call's are copied into it.
PyObject *in_mode(PyObject *const *own, PyObject *outputs, PyObject *prepared) {
    Owned mode(PyObject_CallNoArgs(own[MODE_NOW]));
    if (!mode) return nullptr;
    if (mode.get() == prepared) return Py_NewRef(outputs);
    const Py_ssize_t count = PyTuple_GET_SIZE(outputs);
    Owned copies(PyTuple_New(count));
    for (Py_ssize_t index = 0; copies && index < count; ++index) {
        PyObject *copy = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(outputs, index), clone_name);
        if (copy == nullptr) return nullptr;
        PyTuple_SET_ITEM(copies.get(), index, copy);
    }
    return copies.give();
}

// Launch, by whoever has the lock; null without an exception where the call has to go the other way.
PyObject *launched(PyObject *const *own, PyObject *tensor) {
    Word source, at, stream = 0, now = 0, device = 0, index = 0;
    if (!address_of(tensor, &source)) return nullptr;
    Owned form(Py_XNewRef(form_at(own[FORMS], source)));
    if (!form) return nullptr;
    Owned outputs(PyObject_GetAttr(form.get(), outputs_name));
    if (!outputs || outputs.get() == Py_None) return nullptr;
    if (!number(Owned(PyObject_GetAttr(form.get(), table_name)).get(), &at) ||
        !number(Owned(PyObject_GetAttr(own[GRAPH], stream_name)).get(), &stream) ||
        !number(Owned(PyObject_CallOneArg(own[STREAM_NOW], own[INDEX])).get(), &now) ||
        !number(Owned(PyObject_CallNoArgs(own[DEVICE_NOW])).get(), &device) || !number(own[INDEX], &index))
        return nullptr;
    if (now != stream || device != index) return nullptr;
    const Word *table = pointer<const Word>(at);
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = reinterpret_cast<Launch>(table[0])(pointer<void>(table[1]), pointer<void>(stream));
    Py_END_ALLOW_THREADS;
    if (status != 0) return nullptr;  // a thread that has not used the device yet
    Owned prepared(PyObject_GetAttr(form.get(), inference_name));
    if (!prepared) return nullptr;
    // while the GPU works; where this fails, the next call tries again, and raises it
    if (own[FRESH] != Py_None && !prepare(own, form.get(), table, source)) PyErr_Clear();
    return own[FRESH] == Py_None ? outputs.give() : in_mode(own, outputs.get(), prepared.get());
}

PyObject *answer(PyObject *bound, PyObject *tensor) {
    PyObject *const *own = &PyTuple_GET_ITEM(bound, 0);
    Owned same(PyObject_CallOneArg(own[SAME], tensor));
    if (!same) return nullptr;
    if (same.get() != Py_True) Py_RETURN_NOTIMPLEMENTED;
    if (!Owned(PyObject_CallNoArgs(own[ACQUIRE]))) return nullptr;
    Owned flat(launched(own, tensor));
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Owned released(PyObject_CallNoArgs(own[RELEASE]));
    PyErr_Restore(type, value, trace);
    if (PyErr_Occurred()) return nullptr;
    if (flat) return PyObject_CallOneArg(own[RESTORE], flat.get());
    Owned slow(PyObject_CallOneArg(own[GRAPH], tensor));
    return slow ? PyObject_CallOneArg(own[RESTORE], slow.get()) : nullptr;
}

PyMethodDef answer_method = {"answer", answer, METH_O, "The answer to a tensor, or NotImplemented."};

PyObject *bind(PyObject *, PyObject *parts) {
    if (!PyTuple_CheckExact(parts) || PyTuple_GET_SIZE(parts) != PARTS) {
        PyErr_Format(PyExc_TypeError, "bind takes a tuple of %d", static_cast<int>(PARTS));
        return nullptr;
    }
    if (PyObject *fresh = PyTuple_GET_ITEM(parts, FRESH); fresh != Py_None && PyTuple_GET_SIZE(fresh) > MOST_OUTPUTS) {
        PyErr_SetString(PyExc_ValueError, "too many outputs");
        return nullptr;
    }
    return PyCFunction_New(&answer_method, parts);
}

PyMethodDef methods[] = {{"bind", bind, METH_O, "What answers a kind of call; see quick_call.py."}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "quick_call", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_quick_call() {
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    outputs_name = PyUnicode_InternFromString("outputs");
    inference_name = PyUnicode_InternFromString("inference");
    table_name = PyUnicode_InternFromString("table");
    stream_name = PyUnicode_InternFromString("raw_stream");
    clone_name = PyUnicode_InternFromString("clone");
    return PyModule_Create(&module);
}
