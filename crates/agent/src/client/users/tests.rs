use super::*;

#[test]
fn users_are_read_as_ids_or_any() {
    assert_eq!("".parse(), Ok(TrainerUsers::These(Vec::new())));
    assert_eq!("1000, 1001".parse(), Ok(TrainerUsers::These(vec![1000, 1001])));
    assert_eq!("any".parse(), Ok(TrainerUsers::Any));
    for nonsense in ["all", "-1", "1000;1001", "4294967296"] {
        assert!(nonsense.parse::<TrainerUsers>().is_err(), "{nonsense}");
    }
}

#[test]
fn the_agents_own_user_and_root_are_always_among_them() {
    assert_eq!(TrainerUsers::These(vec![1000, 5]).with_own(5), Some(vec![0, 5, 1000]));
    assert_eq!(TrainerUsers::Any.with_own(5), None);
}
