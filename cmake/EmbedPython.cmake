# embed_python(out a/glue.py …): each file becomes a C++ string in the library, `kGlueSource` for
# glue.py, declared where it is used as `namespace qshard { extern const char* const kGlueSource; }`.
function(embed_python out)
  set(generated "")
  foreach(source IN LISTS ARGN)
    get_filename_component(stem ${source} NAME_WE)
    set(cpp ${CMAKE_BINARY_DIR}/generated/${stem}.cpp)
    add_custom_command(
      OUTPUT ${cpp}
      COMMAND ${CMAKE_COMMAND} -DSOURCE=${source} -DCPP=${cpp} -P
              ${CMAKE_SOURCE_DIR}/cmake/EmbedPythonFile.cmake
      DEPENDS ${source} ${CMAKE_SOURCE_DIR}/cmake/EmbedPythonFile.cmake
      COMMENT "Embedding ${stem}.py" VERBATIM)
    list(APPEND generated ${cpp})
  endforeach()
  set(${out} ${generated} PARENT_SCOPE)
endfunction()
