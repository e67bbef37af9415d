# One executable, qshard_tests, from the rooms of test/cpp; it needs no Python process. And a program that loads
# the library as others do.
enable_testing()
# The asan preset builds qshard_tests alone.
if(NOT QSHARD_SANITIZE)
  add_executable(load_without_python ${CMAKE_SOURCE_DIR}/test/cpp/programs/load_without_python.cpp)
  target_link_libraries(load_without_python PRIVATE torch::torch ${CMAKE_DL_LIBS})
  qshard_warnings(load_without_python)
  add_dependencies(load_without_python qshard_loader)
  add_test(NAME load_without_python COMMAND load_without_python $<TARGET_FILE:qshard_loader>)
  set_tests_properties(load_without_python PROPERTIES TIMEOUT 120)
endif()

file(GLOB test_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/test/cpp/*/test_*.cpp)
if(NOT test_sources)
  return()
endif()
include(GoogleTestSource)  # GTest::gtest_main
find_package(Threads REQUIRED)

add_executable(qshard_tests ${test_sources})
target_link_libraries(qshard_tests PRIVATE qshard GTest::gtest_main Threads::Threads)
qshard_warnings(qshard_tests)
qshard_sanitize(qshard_tests)
# The library's precompiled header, which takes as long as several sources: with the library's -fPIC,
# not an executable's -fPIE, GCC takes it here too.
set_target_properties(qshard_tests PROPERTIES POSITION_INDEPENDENT_CODE OFF)
target_compile_options(qshard_tests PRIVATE -fPIC)
target_precompile_headers(qshard_tests REUSE_FROM qshard)
# One ctest test: loading torch costs more than all of them. torch's process-wide registries are never
# freed, by its design, so leaks are not looked for.
add_test(NAME qshard_tests COMMAND qshard_tests)
set_tests_properties(qshard_tests PROPERTIES TIMEOUT 1200 ENVIRONMENT
                     "ASAN_OPTIONS=detect_leaks=0;UBSAN_OPTIONS=print_stacktrace=1")
