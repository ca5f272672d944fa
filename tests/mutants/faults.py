"""Twenty faults, each of which breaks another guarantee."""

from tests.mutants.fault import Fault

TWENTY = (
    # --- Runs ---------------------------------------------------------------------------------------------------------
    Fault(
        name="resume_forgets_the_data_position",
        guarantee="A run that is killed anywhere",
        file="nemo_style_rlhf/rollout/queue.py",
        old="self._data_end = resolved(position)",
        new="self._data_end = resolved(0)",
        tests=("tests/unit/rollout/test_queue.py::test_a_restored_queue_goes_on_where_the_checkpoint_stood",),
    ),
    Fault(
        name="data_order_has_no_seed",
        guarantee="Two runs of the same seed",
        file="nemo_style_rlhf/data/sampling.py",
        old="np.random.default_rng((self.seed, epoch)).permutation(self.num_prompts)",
        new="np.random.default_rng().permutation(self.num_prompts)",
        tests=("tests/unit/data/test_sampling.py::test_two_takes_equal_one_and_a_fresh_sampler_continues_anywhere",),
    ),
    Fault(
        name="changed_settings_are_resumed",
        guarantee="A resume that would mix",
        file="nemo_style_rlhf/checkpoint/starts.py",
        old="if name in saved and saved[name] != value:",
        new="if name in saved and saved[name] is None:",
        tests=("tests/unit/checkpoint/test_starts.py::test_what_may_not_change_is_one_sentence",),
    ),
    Fault(
        name="owners_share_their_lock",
        guarantee="A folder has one trainer",
        file="nemo_style_rlhf/checkpoint/owner.py",
        old="fcntl.LOCK_EX | fcntl.LOCK_NB",
        new="fcntl.LOCK_SH | fcntl.LOCK_NB",
        tests=(
            "tests/unit/checkpoint/test_owner.py::"
            "test_a_second_process_of_one_machine_is_told_of_the_first_even_of_a_stopped_one",
        ),
    ),
    Fault(
        name="old_checkpoint_goes_before_the_new_one_is_there",
        guarantee="A full disk",
        file="nemo_style_rlhf/checkpoint/files.py",
        old="            target.rename(replaced)\n        beside.replace(target)",
        new="            remove(target)\n        beside.replace(target)",
        tests=(
            "tests/unit/critic_service/test_store.py::"
            "test_where_the_new_folder_cannot_take_its_place_the_old_one_is_back",
        ),
    ),
    # --- Samples and weights ------------------------------------------------------------------------------------------
    Fault(
        name="digest_of_weights_is_not_compared",
        guarantee="Every weight transfer",
        file="nemo_style_rlhf/generation/transfer.py",
        old="if (arrived := digest.hexdigest()) != update.digest:",
        new="if not (arrived := digest.hexdigest()):",
        tests=("tests/unit/generation/test_weight_store.py::test_100_of_100_damages_are_refused",),
    ),
    Fault(
        name="seeds_ignore_the_sample",
        guarantee="A sample depends on its seed",
        file="nemo_style_rlhf/generation/seeds.py",
        old='f"{run_seed}/{sample.step}/{sample.prompt_id}/{sample.index}"',
        new='f"{run_seed}/{sample.step}/{sample.prompt_id}"',
        tests=("tests/unit/generation/test_seeds.py::test_seeds_are_a_function_of_run_step_prompt_and_index_alone",),
    ),
    Fault(
        name="samples_are_one_version_too_new",
        guarantee="Asynchronous training",
        file="nemo_style_rlhf/rollout/version_schedule.py",
        old="return max(0, step - 1 - self.staleness)",
        new="return max(0, step - self.staleness)",
        tests=("tests/unit/rollout/test_version_schedule.py::test_the_versions_sample_every_step_once_in_order",),
    ),
    Fault(
        name="observed_tokens_are_learned",
        guarantee="What the policy sampled in an episode",
        file="nemo_style_rlhf/agents/episode.py",
        old="self.mask += [False] * len(tokens)",
        new="self.mask += [True] * len(tokens)",
        tests=("tests/unit/agents/test_episode.py::test_sampled_tokens_stay_and_observed_ones_are_not_learned",),
    ),
    Fault(
        name="seeds_count_calls_in_the_order_of_arrival",
        guarantee="Programs get the same answers",
        file="nemo_style_rlhf/agents/sessions.py",
        old="asked = self._asked[request, tuple(token_ids)]\n",
        new="asked = self._asked.total()\n",
        tests=("tests/unit/agents/test_sessions.py::test_the_order_of_calls_and_answers_changes_nothing",),
    ),
    Fault(
        name="weights_that_the_model_lacks_are_ignored",
        guarantee="Models that are not computed right",
        file="nemo_style_rlhf/models/loading.py",
        old="    _refuse_unread(config.path, model, unexpected)\n",
        new="",
        tests=("tests/unit/models/test_loading.py::test_a_policys_unknown_weights_are_refused",),
    ),
    # --- The protocol -------------------------------------------------------------------------------------------------
    Fault(
        name="every_lease_is_the_current_one",
        guarantee="One writer",
        file="nemo_style_rlhf/critic_service/ledger.py",
        old="if self._lease is None or not secrets.compare_digest(lease.encode(), self._lease.encode()):",
        new="if self._lease is None:",
        tests=("tests/unit/critic_service/test_ledger.py::test_an_answer_of_a_lost_lease_is_nobodys",),
    ),
    Fault(
        name="a_train_step_is_applied_again",
        guarantee="A train step is applied exactly once",
        file="nemo_style_rlhf/critic_service/ledger.py",
        old="if part.step != self._step + 1:",
        new="if part.step > self._step + 1:",
        tests=("tests/unit/critic_service/test_ledger.py::test_an_answer_of_a_lost_lease_is_nobodys",),
    ),
    Fault(
        name="digests_of_files_are_not_compared",
        guarantee="Checkpoints come back to the last bit",
        file="nemo_style_rlhf/checkpoint/files.py",
        old="return sorted(digests.keys() - files) or damaged_files(directory, digests)",
        new="return sorted(digests.keys() - files)",
        tests=("tests/unit/checkpoint/test_store.py::test_a_damaged_one_falls_back_to_the_one_before_and_says_so",),
    ),
    Fault(
        name="every_token_opens_the_door",
        guarantee="Loopback unless you give it a token",
        file="nemo_style_rlhf/wire/exchange.py",
        old="if not visitor.shows(given, self._door.settings.token):",
        new="if not given:",
        tests=(
            "tests/unit/wire/test_listening.py::test_requests_reach_the_backend_within_the_limits_of_their_endpoint",
        ),
    ),
    # --- Numbers ------------------------------------------------------------------------------------------------------
    Fault(
        name="nan_passes_the_mask",
        guarantee="Losses, advantages and KL",
        file="nemo_style_rlhf/algorithms/masking.py",
        old="return torch.where(mask.bool(), x, torch.zeros_like(x))",
        new="return x * mask.bool()",
        tests=(
            "tests/unit/algorithms/test_masking.py::test_what_stands_under_mask_0_reaches_neither_result_nor_gradient",
        ),
    ),
    Fault(
        name="each_micro_batch_has_its_own_normalizer",
        guarantee="Splitting into micro-batches",
        file="nemo_style_rlhf/ppo/update.py",
        old="        aggregation=config.loss_aggregation,\n        normalizer=normalizer,\n",
        new="        aggregation=config.loss_aggregation,\n        normalizer=None,\n",
        tests=("tests/unit/ppo/test_invariance.py::test_splitting_and_padding_change_neither_loss_nor_gradient",),
    ),
    Fault(
        name="rewards_are_read_at_the_pad_token",
        guarantee="Rewards and values",
        file="nemo_style_rlhf/models/scalar.py",
        old="        counted &= input_ids != pad_token_id\n",
        new="        counted &= input_ids != -1\n",
        tests=("tests/unit/supervised/test_batches.py::test_reward_model_scores_are_those_transformers_pools",),
    ),
    # --- Rewards, and the rest ----------------------------------------------------------------------------------------
    Fault(
        name="a_judge_is_asked_by_each_process",
        guarantee="A judge is asked each question once",
        file="nemo_style_rlhf/scoring/verdict_store.py",
        old="            if (known := _read(path)) is None:\n                known = ask()\n"
        "                self._in_folder(lambda: _write(path, known))",
        new="            known = ask()\n            self._in_folder(lambda: _write(path, known))",
        tests=("tests/unit/scoring/test_judge.py::test_processes_that_share_the_folder_ask_once",),
    ),
    Fault(
        name="the_page_answers_under_any_name",
        guarantee="The page of runs tells strangers nothing",
        file="nemo_style_rlhf/watch/door.py",
        old="return name.lower() in self.names",
        new="return bool(name)",
        tests=("tests/unit/watch/test_server.py::test_strangers_get_nothing",),
    ),
)
