# AddressSanitizer and UndefinedBehaviorSanitizer for the library and its GoogleTests.
#
# `vptr` is left out: it asks for type information of classes that torch, built without it, hides.
function(qshard_sanitize target)
  if(QSHARD_SANITIZE)
    # With sanitizers GCC warns of variables that are set (gcc.gnu.org/PR105562, std::variant's storage).
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    set(flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all
              -fno-omit-frame-pointer)
    target_compile_options(${target} PRIVATE ${flags})
    target_link_options(${target} PRIVATE ${flags})
  endif()
endfunction()
