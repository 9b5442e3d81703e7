use std::os::unix::fs::PermissionsExt;

use super::*;

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn make(path: &Path) -> Result<VersionsFolder, FolderError> {
    VersionsFolder::make(path, ["actor-0", "actor-1"].into_iter())
}

#[test]
fn folder_that_was_made_is_removed_with_what_agents_made() {
    let outer = tempfile::tempdir().unwrap();
    let folder = make(&outer.path().join("new/versions")).unwrap();
    fs::create_dir(folder.path().join("actor-0")).unwrap();
    drop(folder);
    assert_eq!(outer.path().read_dir().unwrap().count(), 0);
}

#[test]
fn folder_of_a_group_that_was_killed_is_removed_by_the_next() {
    let outer = tempfile::tempdir().unwrap();
    let path = outer.path().join("versions");
    std::mem::forget(make(&path).unwrap());
    drop(make(&path).unwrap());
    assert!(!path.exists());
}

#[test]
fn folder_of_the_user_and_what_is_left_in_it_stay() {
    let outer = tempfile::tempdir().unwrap();
    let folder = make(outer.path()).unwrap();
    fs::create_dir_all(folder.path().join("actor-0/left")).unwrap();
    drop(folder);
    assert!(outer.path().join("actor-0/left").exists());
    drop(make(&outer.path().join("actor-0/left")).unwrap());
    assert!(outer.path().join("actor-0/left").exists(), "it was there before");
    let made = make(&outer.path().join("own")).unwrap();
    fs::create_dir_all(made.path().join("actor-1/record")).unwrap();
    drop(made);
    assert!(outer.path().join("own/actor-1/record").exists());
}

/// Another user renamed the folder of a pod, and put one of their own in its place before the engine loaded from it.
#[test]
fn folder_below_one_that_others_may_write_is_refused() {
    let outer = tempfile::tempdir().unwrap();
    let open = outer.path().join("open");
    fs::create_dir(&open).unwrap();
    for (bits, says) in [(0o777, "can be written by everybody (mode 777)"), (0o757, "everybody")] {
        mode(&open, bits);
        let refused = make(&open.join("versions")).unwrap_err().to_string();
        assert!(refused.contains(says) && refused.contains("chmod o-w"), "{refused}");
        assert_eq!(open.read_dir().unwrap().count(), 0, "nothing was made");
    }
    // As /dev/shm: a folder belongs to the one who made it.
    mode(&open, 0o1777);
    drop(make(&open.join("versions")).unwrap());
    mode(&open, 0o755);
    drop(make(&open.join("versions")).unwrap());
}

#[test]
fn link_is_followed_once_and_its_end_is_checked() {
    let outer = tempfile::tempdir().unwrap();
    let (end, link) = (outer.path().join("end"), outer.path().join("link"));
    fs::create_dir(&end).unwrap();
    std::os::unix::fs::symlink(&end, &link).unwrap();
    let folder = make(&link.join("versions")).unwrap();
    assert_eq!(folder.path(), fs::canonicalize(&end).unwrap().join("versions"));
    drop(folder);
    mode(&end, 0o777);
    assert!(matches!(make(&link.join("versions")), Err(FolderError::Writable { .. })));
}

#[test]
fn folder_that_another_user_made_first_is_refused() {
    let outer = tempfile::tempdir().unwrap();
    let path = outer.path().join("versions");
    fs::create_dir(&path).unwrap();
    let user = rustix::process::geteuid();
    // Only root may give a folder away. For others it is looked at as another user would.
    if user.is_root() {
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        for asked in [path.clone(), path.join("below")] {
            let refused = make(&asked).unwrap_err().to_string();
            assert!(refused.contains("belongs to user 65534") && refused.contains("a folder of your own"), "{refused}");
        }
    } else {
        let found = fs::symlink_metadata(&path).unwrap();
        assert!(matches!(check(&path, &found, user.as_raw() + 1), Err(FolderError::Foreign { .. })));
    }
}
