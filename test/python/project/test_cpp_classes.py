"""What the classes of the C++ code offer: few functions each, and no plane that can be written."""

import re
from pathlib import Path

import cpp_headers

CHECKOUT = Path(__file__).parents[3]
MOST = 30

# Functions that return a reference to a tensor, which can be written: of none is it a plane.
NO_PLANES = {
    "FlushState::known_amax": "amaxes that a kernel left",
    "AmaxVector::words": "amaxes that ranks agree on",
    "WriteScope::tensor": "the quantized tensor that is written",
    "NormOperand::statistics": "of an activation",
    "NormOperand::amax": "of an activation",
    "PlainOperand::amax": "of an activation",
    "SwigluOperand::maxima": "of an activation",
    "TensorState::tensor": "the quantized tensor, as Python gave it",
}


def classes():
    found = {}
    for folder in ("dispatch", "kernels", "ops", "fsdp"):
        for suffix in ("h", "cuh", "cpp", "cu"):
            for file in sorted((CHECKOUT / folder).rglob(f"*.{suffix}")):
                for name, functions in cpp_headers.public_functions(file.read_text()).items():
                    found.setdefault(name, []).extend(functions)
    return found


def test_the_headers_are_read():
    """The other tests look at every class, so the reader must not lose any."""
    source = '''
    template <typename T>
    class Shelf final : public Thing<T> {
      Shelf hidden(int);
     public:
      explicit Shelf(int a) : a_{a}, b_(a) {}  // void in_a_comment();
      ~Shelf() override;
      Shelf(const Shelf&) = delete;
      friend class Other;
      using Base::get;
      template <typename U> bool has(U u) const { return [&] { return u; }(); }
      std::function<void(int)> called = {};
      struct Inside { int x = f(1); void touch(); };
      const at::Tensor& plane() const { return plane_; }
      bool operator==(const Shelf&) const;
     private:
      void more();
    };
    namespace a { struct Plain { static int count(); int y[2] = {1, 2}; }; }
    '''
    functions = cpp_headers.public_functions(source)
    names = {
        name: [re.search(r"([\w~=]+)\(", function)[1] for function in all_]
        for name, all_ in functions.items()
    }
    assert names == {
        "Shelf": ["Shelf", "~Shelf", "has", "plane", "operator=="],
        "Shelf::Inside": ["touch"],
        "Plain": ["count"],
    }
    found = classes()
    for name in ("QuantizedBuffer", "Planes", "Grid", "FlushState", "Placement", "WriteScope",
                 "QuantizedTensorImpl", "ScalingState", "Layout"):
        assert found.get(name), name


def test_no_class_has_many_public_functions():
    many = {name: len(functions) for name, functions in classes().items() if len(functions) > MOST}
    assert not many, f"more than {MOST} public member functions: {many}"


def test_no_function_returns_a_plane_that_can_be_written():
    """A `const at::Tensor&` can be written, too: readers get a ReadOnlyTensor or a pointer."""
    returned = {}
    for name, functions in classes().items():
        for function in functions:
            if found := re.match(r"[^(]*?\b(?:at::)?Tensor& (\w+)\(", function):
                returned[f"{name}::{found[1]}"] = function
    assert returned.keys() == NO_PLANES.keys()
