use super::*;

#[test]
fn packages_are_found_with_cuda_major_and_version() {
    let place = tempfile::tempdir().unwrap();
    let library = |major: u32| place.path().join(format!(".nixl_cu{major}.mesonpy.libs")).join(LIBRARY);
    for major in [13, 12] {
        std::fs::create_dir_all(library(major).parent().unwrap()).unwrap();
        std::fs::write(library(major), "").unwrap();
        std::fs::create_dir(place.path().join(format!("nixl_cu{major}-1.5.{major}.dist-info"))).unwrap();
    }
    assert_eq!(in_place(place.path()), [library(12), library(13)]);
    assert_eq!((cuda_major(&library(13)), version(&library(13)).as_deref()), (Some(13), Some("1.5.13")));
    assert_eq!((cuda_major(Path::new("/opt/lib/libnixl_capi.so")), version(Path::new(LIBRARY))), (None, None));
}

#[test]
fn a_path_that_was_given_is_the_only_candidate() {
    assert_eq!(candidates(Some(Path::new("/opt/x.so")), Some(13)), [PathBuf::from("/opt/x.so")]);
    assert_eq!(candidates(None, Some(13)).last().unwrap(), Path::new(LIBRARY));
}
