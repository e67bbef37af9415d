# unity_by_folder(target sources…) compiles up to eight sources of a folder as one, because the compiler then
# instantiates torch's templates once for all of them: this takes about a third of the time. Names in anonymous
# namespaces therefore differ within a folder. Sources that skip the precompiled header are compiled alone, since
# some have flags of their own. https://cmake.org/cmake/help/latest/prop_tgt/UNITY_BUILD_MODE.html
function(unity_by_folder target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source ${ARGN})
    get_source_file_property(skipped ${source} SKIP_PRECOMPILE_HEADERS)
    if(skipped)
      continue()
    endif()
    get_filename_component(folder ${source} DIRECTORY)
    string(MAKE_C_IDENTIFIER "${folder}" group)
    math(EXPR count_${group} "0${count_${group}} + 1")
    math(EXPR part "(${count_${group}} - 1) / 8")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group}_${part})
  endforeach()
endfunction()
